"""What `make demo` found, in numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from demo.service import Forwards

SAME_WITHIN = 2  # of 255, per channel


@dataclass(frozen=True)
class Rate:
    """How many jobs and pictures were made in how long."""

    jobs: int
    pictures: int
    seconds: float

    @property
    def pictures_per_s(self) -> float:
        return self.pictures / self.seconds


@dataclass(frozen=True)
class Summary:
    """The findings of one demo. `same` counts the pictures that the job alone made again, of `compared`."""

    submitted: int
    succeeded: int
    signatures: int
    fitting: int
    forwards: Forwards
    waits_ms: tuple[int, ...]
    fused: Rate
    alone: Rate
    same: int
    compared: int

    def lines(self) -> list[str]:
        """Return the summary as it is printed."""
        part = "" if self.alone.jobs == self.submitted else f", the first {self.alone.jobs} of the jobs"
        return [
            f"jobs: {self.succeeded} of {self.submitted} succeeded, in {self.signatures} signatures",
            f"fused forwards: {self.forwards.forwards}",
            f"pictures per forward: {self.forwards.mean_rows:.1f} (mean)",
            f"throughput, fused: {self.fused.pictures_per_s:.1f} pictures/s "
            f"({self.fused.pictures} in {self.fused.seconds:.1f} s)",
            f"throughput, one at a time: {self.alone.pictures_per_s:.1f} pictures/s "
            f"({self.alone.pictures} in {self.alone.seconds:.1f} s{part})",
            f"speed-up: {self.fused.pictures_per_s / self.alone.pictures_per_s:.1f}",
            f"queue wait: p50 {percentile(self.waits_ms, 50)} ms, p95 {percentile(self.waits_ms, 95)} ms",
            f"pictures that fit their prompts: {self.fitting} of {self.fused.pictures}",
            f"pictures equal to those made alone: {self.same} of {self.compared} (within {SAME_WITHIN} of 255)",
        ]


def percentile(values: Sequence[int], percent: int) -> int:
    """Return the smallest value that `percent` of all do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0


def same(one: Image.Image, other: Image.Image) -> bool:
    """Tell whether two pictures are equal within `SAME_WITHIN` in every channel of every pixel."""
    if one.size != other.size:
        return False
    difference = np.abs(np.asarray(one, dtype=np.int16) - np.asarray(other, dtype=np.int16))
    return bool(difference.max() <= SAME_WITHIN)
