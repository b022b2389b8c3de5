"""`python -m bench.preempt`: an interactive job that arrives during a full batch of bulk jobs.

In one process and engine, in turns: the batch solo; the batch with an interactive job that arrives at a quarter of it
and preempts a row at the next step; the same with that job as another bulk job, which waits for a slot; and the
interactive job solo. Latencies are from submit to the finished image, medians over the turns. `--json FILE` saves the
figures.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from bench import record, shapes
from shared.config.models_file import Catalog, Limits, ModelSpec
from shared.config.settings import Settings
from shared.job import Job, Priority
from worker.engine import EngineEvent, EngineRequest, ForwardDone, JobFinished, JobProgress, OutputReady, Pixels
from worker.engine.engine import Engine

TIMEOUT_S = 600.0
# Priority of the job that arrives during the batch; None: no job.
SCENARIOS = {"solo": None, "preempt": Priority.INTERACTIVE, "queue": Priority.BULK}


@dataclass(frozen=True)
class PreemptResult:
    """Medians in milliseconds. `steps_waited` is the maximum number of forwards between the arrival of the interactive
    job and its first one; `steps_queued` the same if it is a bulk job.
    """

    model: str
    side: int
    rows: int
    bulk_steps: int
    interactive_steps: int
    repeats: int
    interactive_solo_ms: float
    interactive_preempt_ms: float
    interactive_queue_ms: float
    steps_waited: int
    steps_queued: int
    bulk_solo_ms: float
    bulk_preempt_ms: float
    bulk_queue_ms: float
    largest_difference: int

    def __str__(self) -> str:
        return (
            f"{self.model} {self.side}², {self.interactive_steps} interactive steps into {self.rows} bulk jobs "
            f"of {self.bulk_steps}:\n  it ends after {self.interactive_preempt_ms:.0f} ms with preemption, "
            f"{self.interactive_queue_ms:.0f} ms queued, {self.interactive_solo_ms:.0f} ms solo; forwards "
            f"before its first: {self.steps_waited}, queued {self.steps_queued}\n  bulk jobs, mean: "
            f"{self.bulk_preempt_ms:.0f} ms, "
            f"{self.bulk_queue_ms:.0f} and {self.bulk_solo_ms:.0f}; their images differ by "
            f"{self.largest_difference} of 255"
        )


class LateJobRunner:
    """Submits jobs to an engine, a late one when the first reaches a step, and records when each ended."""

    def __init__(self, spec: ModelSpec, device: str, threads: int) -> None:
        self._spec = spec
        self._engine = Engine(Catalog((spec,)), self, Settings(torch_threads=threads, device=device))
        self._change = threading.Condition()
        self._late: tuple[int, Job] | None = None
        self._error: str | None = None
        self.submitted_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.images: dict[str, Pixels] = {}
        self.order: list[str] = []
        self._engine.start()
        self._engine.warm_up()

    def run(self, jobs: list[Job], late: Job | None = None, at_step: int = 0) -> None:
        """Run jobs to their end; raises `RuntimeError` if one fails or the timeout expires."""
        self._late = None if late is None else (at_step, late)
        self.ended_s, self.images, self.order = {}, {}, []
        names = {job.id for job in jobs} | ({late.id} if late else set())
        self._submit(*jobs)
        with self._change:
            ended = self._change.wait_for(lambda: self._error or names <= self.ended_s.keys(), TIMEOUT_S)
        if self._error or not ended:
            raise RuntimeError(self._error or f"not all jobs ended in {TIMEOUT_S:.0f} s")

    def _submit(self, *jobs: Job) -> None:
        self.submitted_s |= dict.fromkeys((job.id for job in jobs), time.perf_counter())
        self._engine.submit(*(EngineRequest(job.id, job, self._spec) for job in jobs))

    def latency_ms(self, name: str) -> float:
        return 1000 * (self.ended_s[name] - self.submitted_s[name])

    def close(self) -> None:
        self._engine.stop(10)

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case JobProgress(step=step) if self._late is not None and step >= self._late[0]:
                (_, job), self._late = self._late, None
                self.order.append("arrival")
                self._submit(job)
            case OutputReady(claim_key=key, output=output):
                self.images[key] = output.pixels
            case JobFinished(claim_key=key, error=error):
                with self._change:
                    if error is not None:
                        self._error = error.message
                    self.ended_s[key] = time.perf_counter()
                    self._change.notify_all()
            case ForwardDone(claim_key=key):
                self.order.append(key)


@dataclass
class PreemptTurns:
    """Runs turns and collects their latencies."""

    runner: LateJobRunner
    options: argparse.Namespace
    latencies_ms: dict[str, list[float]] = field(default_factory=dict)
    steps_waited: dict[str, int] = field(default_factory=dict)
    difference: int = 0

    def run(self, turn: int) -> None:
        """Run all scenarios once, in an order that alternates between turns."""
        images: dict[str, list[Pixels]] = {}
        for scenario, priority in sorted(SCENARIOS.items(), reverse=bool(turn % 2)):
            batch = [
                self._job(f"{scenario}-{turn}-{at}", at, self.options.bulk_steps, Priority.BULK)
                for at in range(self.options.rows)
            ]
            late = None
            if priority is not None:
                late = self._job(f"{scenario}-{turn}-late", 99, self.options.interactive_steps, priority)
            self.runner.run(batch, late, self.options.bulk_steps // 4)
            images[scenario] = [self.runner.images[job.id] for job in batch]
            self._add(f"bulk_{scenario}", statistics.mean(self.runner.latency_ms(job.id) for job in batch))
            if late is not None:
                self._add(f"interactive_{scenario}", self.runner.latency_ms(late.id))
                after = self.runner.order[self.runner.order.index("arrival") + 1 :]
                self.steps_waited[scenario] = max(self.steps_waited.get(scenario, 0), after.index(late.id))
        single = self._job(f"single-{turn}", 99, self.options.interactive_steps, Priority.INTERACTIVE)
        self.runner.run([single])
        self._add("interactive_solo", self.runner.latency_ms(single.id))
        for one, other in zip(images["solo"], images["preempt"], strict=True):
            self.difference = max(self.difference, int(np.abs(one.astype(int) - other).max()))

    def _add(self, name: str, value: float) -> None:
        self.latencies_ms.setdefault(f"{name}_ms", []).append(value)

    def _job(self, name: str, seed: int, steps: int, priority: Priority) -> Job:
        return Job(
            id=name,
            tenant="bench",
            created_at_ms=0,
            model="bench",
            width=self.options.side,
            height=self.options.side,
            prompt=f"a red circle on a blue ground, number {seed}",
            seed=seed,
            steps=steps,
            guidance_scale=5.0,
            priority=priority,
        )


def measure(model: str, runner: LateJobRunner, options: argparse.Namespace) -> PreemptResult:
    """Return the medians over all turns except the first, which warms up."""
    turns = PreemptTurns(runner, options)
    for turn in range(options.repeats + 1):
        turns.run(turn)
    return PreemptResult(
        model=model,
        side=options.side,
        rows=options.rows,
        bulk_steps=options.bulk_steps,
        interactive_steps=options.interactive_steps,
        repeats=options.repeats,
        steps_waited=turns.steps_waited["preempt"],
        steps_queued=turns.steps_waited["queue"],
        largest_difference=turns.difference,
        **{name: round(statistics.median(values[1:]), 1) for name, values in turns.latencies_ms.items()},
    )


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", choices=[*shapes.SHAPES], default=["sd", "flux"])
    parser.add_argument("--side", type=int, default=64, help="pixels")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--bulk-steps", type=int, default=20)
    parser.add_argument("--interactive-steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    """Measure all chosen models."""
    options = parse_options(argv)
    shapes.disable_progress_bars()
    results = []
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            shapes.save(model, Path(folder), options.device, getattr(torch, options.dtype))
            spec = ModelSpec(
                id="bench", source=folder, max_batch=options.rows, dtype=options.dtype, limits=Limits(max_images=1)
            )
            runner = LateJobRunner(spec, options.device, options.threads)
            try:
                results.append(measure(model, runner, options))
            finally:
                runner.close()
        print(results[-1], flush=True)
    if options.json:
        figures = [asdict(result) for result in results]
        record.write(options.json, {"results": figures}, threads=options.threads, dtype=options.dtype)


if __name__ == "__main__":
    main()
