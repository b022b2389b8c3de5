"""Shows how far the jobs are: a live line on a terminal, now and then a plain one elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_EVERY_S = 2.0


class Board:
    """Takes notes on jobs by id and shows their sum."""

    def __init__(self, jobs: int, console: Console) -> None:
        self._jobs = jobs
        self._console = console
        self._status: dict[str, str] = {}
        self._steps: dict[str, tuple[int, int]] = {}
        self._shown_at = 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._live = Progress(*columns, console=console, disable=not console.is_terminal)
        self._done_bar = self._live.add_task("jobs ended", total=jobs)
        self._step_bar = self._live.add_task("denoising steps", total=None)

    def __enter__(self) -> Board:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._live.stop()
        if kind is None and not self._console.is_terminal:
            self._console.print(self.line())

    def note(self, job_id: str, status: str, step: int, total: int) -> None:
        """Take down what a job's event says."""
        self._status[job_id] = status
        # The terminal event may come without progress; what was done stays done.
        if total:
            self._steps[job_id] = (step, total)
        if status == "succeeded" and job_id in self._steps:
            self._steps[job_id] = (self._steps[job_id][1],) * 2
        self._show()

    def line(self) -> str:
        """Return how things stand."""
        states = Counter(self._status.values())
        ended = sum(count for state, count in states.items() if state not in ("queued", "running"))
        steps = sum(step for step, _ in self._steps.values())
        return f"{ended} of {self._jobs} jobs ended, {states['running']} running, {steps} denoising steps done"

    def _show(self) -> None:
        if self._console.is_terminal:
            ended = sum(status not in ("queued", "running") for status in self._status.values())
            steps, total = (
                (sum(column) for column in zip(*self._steps.values(), strict=True)) if self._steps else (0, 0)
            )
            self._live.update(self._done_bar, completed=ended)
            self._live.update(self._step_bar, completed=steps, total=total or None)
        elif time.monotonic() - self._shown_at >= PLAIN_EVERY_S:
            self._shown_at = time.monotonic()
            self._console.print(self.line())
