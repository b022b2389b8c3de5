"""`python -m bench.engine.preempt`: an interactive job that arrives during a full batch of bulk jobs.

In one process and engine, in turns: the batch solo; the batch with an interactive job that arrives at a quarter of it
and preempts a row at the next step; the same with that job as another bulk job, which waits for a slot; and the
interactive job solo. Latencies are from submit to the finished image, medians over the turns. `--json FILE` saves the
figures.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from bench.common import record
from bench.engine import shapes
from bench.engine.runner import EngineRunner, bench_job, prompt
from shared.config.models_file import Limits, ModelSpec
from shared.job import Job
from shared.job_fields import Priority
from worker.engine.protocol import Pixels

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


@dataclass
class PreemptTurns:
    """Runs turns and collects their latencies."""

    runner: EngineRunner
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
        fields = {"seed": seed, "steps": steps, "priority": priority}
        return bench_job(name, self.runner.spec, self.options.side, prompt(seed), **fields)


def measure(model: str, runner: EngineRunner, options: argparse.Namespace) -> PreemptResult:
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
            runner = EngineRunner(spec, options.device, options.threads)
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
