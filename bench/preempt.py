"""`python -m bench.preempt`: an interactive job that comes into a full batch of bulk jobs.

In one process and engine, in turns: the batch alone; the same with an interactive job that comes at a quarter of it and
sets a row aside at the next step; the same with that job as one more bulk job, which waits for a seat as without
preemption; and the interactive job alone. Latencies are from seating to the finished picture, medians over the turns.
`--json FILE` keeps the figures.
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

PATIENCE_S = 600.0
# What comes into the batch: nothing, an interactive job, or the same as one more bulk job.
WAYS = {"alone": None, "set_aside": Priority.INTERACTIVE, "in_line": Priority.BULK}


@dataclass(frozen=True)
class Result:
    """Medians in milliseconds. `steps_waited` counts the forwards between the arrival and the interactive job's first
    one, the most over the turns; `steps_in_line` the same where it is one more bulk job.
    """

    model: str
    side: int
    rows: int
    bulk_steps: int
    interactive_steps: int
    repeats: int
    interactive_alone_ms: float
    interactive_set_aside_ms: float
    interactive_in_line_ms: float
    steps_waited: int
    steps_in_line: int
    bulk_alone_ms: float
    bulk_set_aside_ms: float
    bulk_in_line_ms: float
    largest_difference: int

    def __str__(self) -> str:
        return (
            f"{self.model} {self.side}², {self.interactive_steps} interactive steps into {self.rows} bulk jobs "
            f"of {self.bulk_steps}:\n  it ends after {self.interactive_set_aside_ms:.0f} ms where it sets rows aside, "
            f"{self.interactive_in_line_ms:.0f} ms in line, {self.interactive_alone_ms:.0f} ms alone; forwards that it "
            f"waited for: {self.steps_waited}, in line {self.steps_in_line}\n  bulk jobs, mean: "
            f"{self.bulk_set_aside_ms:.0f} ms, "
            f"{self.bulk_in_line_ms:.0f} and {self.bulk_alone_ms:.0f}; their pictures differ by "
            f"{self.largest_difference} of 255"
        )


class Lobby:
    """Seats jobs, the late one once the first has come to a step, and keeps when each ended; the engine's listener."""

    def __init__(self, spec: ModelSpec, device: str, threads: int) -> None:
        self._spec = spec
        self._engine = Engine(Catalog((spec,)), self, Settings(torch_threads=threads, device=device))
        self._change = threading.Condition()
        self._late: tuple[int, Job] | None = None
        self._error: str | None = None
        self.seated_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.pictures: dict[str, Pixels] = {}
        self.order: list[str] = []
        self._engine.start()
        self._engine.warm_up()

    def run(self, jobs: list[Job], late: Job | None = None, at_step: int = 0) -> None:
        """Run jobs to their end; raises `RuntimeError` when one fails or none ends for long."""
        self._late = None if late is None else (at_step, late)
        self.ended_s, self.pictures, self.order = {}, {}, []
        names = {job.id for job in jobs} | ({late.id} if late else set())
        self._seat(*jobs)
        with self._change:
            ended = self._change.wait_for(lambda: self._error or names <= self.ended_s.keys(), PATIENCE_S)
        if self._error or not ended:
            raise RuntimeError(self._error or f"not all jobs ended in {PATIENCE_S:.0f} s")

    def _seat(self, *jobs: Job) -> None:
        self.seated_s |= dict.fromkeys((job.id for job in jobs), time.perf_counter())
        self._engine.submit(*(EngineRequest(job.id, job, self._spec) for job in jobs))

    def latency_ms(self, name: str) -> float:
        return 1000 * (self.ended_s[name] - self.seated_s[name])

    def close(self) -> None:
        self._engine.stop(10)

    def on_event(self, event: EngineEvent) -> None:
        match event:
            case JobProgress(step=step) if self._late is not None and step >= self._late[0]:
                (_, job), self._late = self._late, None
                self.order.append("arrival")
                self._seat(job)
            case OutputReady(claim_key=key, output=output):
                self.pictures[key] = output.pixels
            case JobFinished(claim_key=key, error=error):
                with self._change:
                    if error is not None:
                        self._error = error.message
                    self.ended_s[key] = time.perf_counter()
                    self._change.notify_all()
            case ForwardDone(claim_key=key):
                self.order.append(key)


@dataclass
class Turns:
    """What was seen, turn by turn."""

    lobby: Lobby
    chosen: argparse.Namespace
    latencies_ms: dict[str, list[float]] = field(default_factory=dict)
    steps_waited: dict[str, int] = field(default_factory=dict)
    difference: int = 0

    def take(self, turn: int) -> None:
        """Run all ways once, their order changing from turn to turn."""
        pictures: dict[str, list[Pixels]] = {}
        for way, priority in sorted(WAYS.items(), reverse=bool(turn % 2)):
            batch = [
                self._job(f"{way}-{turn}-{at}", at, self.chosen.bulk_steps, Priority.BULK)
                for at in range(self.chosen.rows)
            ]
            late = None
            if priority is not None:
                late = self._job(f"{way}-{turn}-late", 99, self.chosen.interactive_steps, priority)
            self.lobby.run(batch, late, self.chosen.bulk_steps // 4)
            pictures[way] = [self.lobby.pictures[job.id] for job in batch]
            self._note(f"bulk_{way}", statistics.mean(self.lobby.latency_ms(job.id) for job in batch))
            if late is not None:
                self._note(f"interactive_{way}", self.lobby.latency_ms(late.id))
                after = self.lobby.order[self.lobby.order.index("arrival") + 1 :]
                self.steps_waited[way] = max(self.steps_waited.get(way, 0), after.index(late.id))
        single = self._job(f"single-{turn}", 99, self.chosen.interactive_steps, Priority.INTERACTIVE)
        self.lobby.run([single])
        self._note("interactive_alone", self.lobby.latency_ms(single.id))
        for one, other in zip(pictures["alone"], pictures["set_aside"], strict=True):
            self.difference = max(self.difference, int(np.abs(one.astype(int) - other).max()))

    def _note(self, name: str, value: float) -> None:
        self.latencies_ms.setdefault(f"{name}_ms", []).append(value)

    def _job(self, name: str, seed: int, steps: int, priority: Priority) -> Job:
        return Job(
            id=name,
            tenant="bench",
            created_at_ms=0,
            model="bench",
            width=self.chosen.side,
            height=self.chosen.side,
            prompt=f"a red circle on a blue ground, number {seed}",
            seed=seed,
            steps=steps,
            guidance_scale=5.0,
            priority=priority,
        )


def measure(model: str, lobby: Lobby, chosen: argparse.Namespace) -> Result:
    """Return the medians over all turns but the first, which warms up."""
    turns = Turns(lobby, chosen)
    for turn in range(chosen.repeats + 1):
        turns.take(turn)
    return Result(
        model=model,
        side=chosen.side,
        rows=chosen.rows,
        bulk_steps=chosen.bulk_steps,
        interactive_steps=chosen.interactive_steps,
        repeats=chosen.repeats,
        steps_waited=turns.steps_waited["set_aside"],
        steps_in_line=turns.steps_waited["in_line"],
        largest_difference=turns.difference,
        **{name: round(statistics.median(values[1:]), 1) for name, values in turns.latencies_ms.items()},
    )


def arguments(line: list[str] | None = None) -> argparse.Namespace:
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
    return parser.parse_args(line)


@torch.no_grad()
def main(line: list[str] | None = None) -> None:
    """Measure what the command line asks for."""
    chosen = arguments(line)
    shapes.hush()
    results = []
    for model in chosen.models:
        with tempfile.TemporaryDirectory() as folder:
            shapes.save(model, Path(folder), chosen.device, getattr(torch, chosen.dtype))
            spec = ModelSpec(
                id="bench", source=folder, max_batch=chosen.rows, dtype=chosen.dtype, limits=Limits(max_images=1)
            )
            lobby = Lobby(spec, chosen.device, chosen.threads)
            try:
                results.append(measure(model, lobby, chosen))
            finally:
                lobby.close()
        print(results[-1], flush=True)
    if chosen.json:
        measured = [asdict(one) for one in results]
        record.write(chosen.json, {"results": measured}, threads=chosen.threads, dtype=chosen.dtype)


if __name__ == "__main__":
    main()
