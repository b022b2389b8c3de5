"""What the stages share: the device, the results file, and the turn of a stage.

A stage is started while the one before it runs, imports its libraries, and waits for its turn. Each result is a line of
JSON in the results file, written at once, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]

DRY = os.environ.get("BENCH_GPU_DRY") == "1"  # on a CPU, with tiny models: the figures mean nothing
DEVICE = "cpu" if DRY else "cuda"
RESULTS = os.environ.get("BENCH_GPU_RESULTS")
AWAITS_TURN = os.environ.get("BENCH_GPU_AWAITS_TURN") == "1"
MARGIN_S = 2.0  # before the limit at which the stage is killed


class Stage:
    """Writes the results of one stage, and knows how much of its time is left."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ends_s = float("inf")

    def wait_for_turn(self) -> None:
        """Wait for the line on standard input that has the seconds of this stage, if `bench.gpu` started it."""
        if AWAITS_TURN:
            limit_s = float(sys.stdin.readline())
            self._ends_s = time.monotonic() + limit_s - MARGIN_S

    @property
    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def emit(self, **figures: Any) -> None:
        """Write a result."""
        line = json.dumps({"stage": self.name, **figures}, default=str)
        if RESULTS is not None:
            with Path(RESULTS).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        print(line, flush=True)

    def run(self, work: Callable[[Figures], None], needs_s: float = 0.0, **names: Any) -> None:
        """Let `work` fill in the figures of a case, and write them, also if it fails; skip it if time is short."""
        if self.left_s < needs_s:
            self.emit(**names, skipped=f"{self.left_s:.0f} s left, needs {needs_s:.0f}")
            return
        figures: Figures = {}
        started = time.monotonic()
        try:
            work(figures)
        except Exception as error:
            traceback.print_exc()
            figures["error"] = f"{type(error).__name__}: {error}"[:400]
        self.emit(**names, **figures, case_s=round(time.monotonic() - started, 1))
        free_memory()


def free_memory() -> None:
    """Free the device memory of what is no longer used."""
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait until the device has done all that is queued."""
    if not DRY:
        torch.cuda.synchronize()


def peak_gib(*, reset: bool = False) -> float | None:
    """Return the peak of the allocated device memory since the last reset, None on a CPU."""
    if DRY:
        return None
    peak = torch.cuda.max_memory_allocated() / 2**30
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return round(peak, 2)
