"""The figures of a demo run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from demo.job_client import ForwardCounts

MAX_DIFFERENCE = 2  # of 255, per channel


@dataclass(frozen=True)
class Throughput:
    jobs: int
    images: int
    seconds: float

    @property
    def images_per_s(self) -> float:
        return self.images / self.seconds


@dataclass(frozen=True)
class Summary:
    """`matching` images show their prompts; `equal` of the `compared` images equal those of a solo run."""

    submitted: int
    succeeded: int
    signatures: int
    matching: int
    forwards: ForwardCounts
    queue_ms: tuple[int, ...]
    fused: Throughput
    solo: Throughput
    equal: int
    compared: int

    def lines(self) -> list[str]:
        """Return the printed summary."""
        speed_up = f"{self.fused.images_per_s / self.solo.images_per_s:.1f}" if self.solo.images else "unknown"
        subset = "" if self.solo.jobs == self.submitted else f", the first {self.solo.jobs} of the jobs"
        return [
            f"jobs: {self.succeeded} of {self.submitted} succeeded, in {self.signatures} signatures",
            f"fused forwards: {self.forwards.forwards}",
            f"images per forward: {self.forwards.mean_rows:.1f} (mean)",
            f"throughput, fused: {self.fused.images_per_s:.1f} images/s "
            f"({self.fused.images} in {self.fused.seconds:.1f} s)",
            f"throughput, one at a time: {self.solo.images_per_s:.1f} images/s "
            f"({self.solo.images} in {self.solo.seconds:.1f} s{subset})",
            f"speed-up: {speed_up}",
            f"queue wait: p50 {percentile(self.queue_ms, 50)} ms, p95 {percentile(self.queue_ms, 95)} ms",
            f"images that match their prompts: {self.matching} of {self.fused.images}",
            f"images equal to those of solo runs: {self.equal} of {self.compared} (within {MAX_DIFFERENCE} of 255)",
        ]


def percentile(values: Sequence[int], percent: int) -> int:
    """Return the nearest-rank percentile; 0 of no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0


def nearly_equal(first: Image.Image, second: Image.Image) -> bool:
    """Return whether two images are equal within `MAX_DIFFERENCE` in every channel of every pixel."""
    if first.size != second.size:
        return False
    difference = np.abs(np.asarray(first, dtype=np.int16) - np.asarray(second, dtype=np.int16))
    return bool(difference.max() <= MAX_DIFFERENCE)
