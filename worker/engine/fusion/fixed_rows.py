"""Reproducible jobs: every forward has the same rows, and a picture always the same place among them.

A kernel may add up the last rows of a matrix in another order than the first: seen on a CPU with the 4 x 77 rows of a
text encoder, whose last prompt was off by 4e-7. What stands in the other rows makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence

from shared.job import Job
from worker.engine.fusion.module_proxy import ParkedCall


def position_of(job: Job, index: int, rows: int) -> int:
    """Return the place of picture `index` of `job` in forwards of so many: a job's own pictures differ in it."""
    return (job.seed + index) % rows


def arrange(calls: Sequence[ParkedCall], places: Sequence[int], rows: int) -> list[ParkedCall]:
    """Return `rows` calls: each of `calls` at its place, copies of the first at the others."""
    filled = [calls[0]] * rows
    for place, call in zip(places, calls, strict=True):
        filled[place] = call
    return filled
