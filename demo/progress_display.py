"""Progress of the demo's jobs: live bars on a terminal, occasional plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_EVERY_S = 2.0


class ProgressDisplay:
    """Status and steps of jobs by id, and their sums on a console."""

    def __init__(self, jobs: int, console: Console) -> None:
        self._jobs = jobs
        self._console = console
        self._status: dict[str, str] = {}
        self._steps: dict[str, tuple[int, int]] = {}
        self._printed_at = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._live = Progress(*columns, console=console, disable=not console.is_terminal)
        self._job_bar = self._live.add_task("finished jobs", total=jobs)
        self._step_bar = self._live.add_task("denoising steps", total=None)

    def __enter__(self) -> ProgressDisplay:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._live.stop()
        if kind is None and not self._console.is_terminal:
            self._console.print(self.line())

    def update(self, job_id: str, status: str, step: int, total: int) -> None:
        """Record an event of a job."""
        self._status[job_id] = status
        # A terminal event can lack progress; the last known progress is kept.
        if total:
            self._steps[job_id] = (step, total)
        if status == "succeeded" and job_id in self._steps:
            self._steps[job_id] = (self._steps[job_id][1],) * 2
        self._show()

    def line(self) -> str:
        """Return the sums as text."""
        states = Counter(self._status.values())
        finished = sum(count for state, count in states.items() if state not in ("queued", "running"))
        steps = sum(step for step, _ in self._steps.values())
        return f"{finished} of {self._jobs} jobs finished, {states['running']} running, {steps} denoising steps"

    def _show(self) -> None:
        if self._console.is_terminal:
            finished = sum(status not in ("queued", "running") for status in self._status.values())
            steps, total = (
                (sum(column) for column in zip(*self._steps.values(), strict=True)) if self._steps else (0, 0)
            )
            self._live.update(self._job_bar, completed=finished)
            self._live.update(self._step_bar, completed=steps, total=total or None)
        elif time.monotonic() - self._printed_at >= PLAIN_EVERY_S:
            self._printed_at = time.monotonic()
            self._console.print(self.line())
