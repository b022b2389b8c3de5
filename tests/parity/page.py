"""Writes the page that says what is fused, from what a run of the whole grid has found."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from parity.cells import Cell
from parity.running import TOLERANCE, Outcome

HEAD = """\
# What is fused

Written by `make parity`; not to be edited. Each row is a tiny pipeline of the real classes with random weights
(float32, CPU): jobs with prompts of different lengths, seeds, steps and guidance go through a whole engine together,
and every picture is compared with the one that the unmodified pipeline makes of the same job alone. A row that differs
by more than {tolerance:g} of the picture's range fails the run. *Rows* are the pictures in each denoiser forward, in
order; guidance's doubling is not counted. *Joined* counts the jobs that came in while others were under way.

Jobs of different sizes share a forward on Z-Image alone, which takes a list of samples. The others take one tensor for
all rows, or positions that are those of the first row: there, the signature keeps sizes apart.

Versions: {versions}.

| family | models | pipelines | fused tasks | largest difference | rows | joined | not supported |
|---|---|---|---|---|---|---|---|
"""
# Asked for, and not to be had from diffusers.
ABSENT = ("| Hunyuan3D | Hunyuan3D-2 | none | none | | | | it makes meshes and is not in diffusers |",)


def write(path: Path, grid: Sequence[Cell], outcomes: Mapping[str, Outcome]) -> None:
    """Write the page to `path`; every cell of `grid` must have an outcome."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "diffusers", "transformers"))
    versions += f", Python {platform.python_version()}"
    lines = [*(_line(cell, outcomes[cell.id]) for cell in grid), *ABSENT]
    path.write_text(HEAD.format(tolerance=TOLERANCE, versions=versions) + "\n".join(lines) + "\n")


def _line(cell: Cell, outcome: Outcome) -> str:
    tasks = ", ".join(task.replace("_", "-") for task in outcome.tasks)
    rows = " ".join(map(str, outcome.rows))
    difference = f"{outcome.largest_difference:.1e}"
    refusals = (f"{name} ({' '.join(error.split())})" for name, error in outcome.refusals.items())
    limits = "; ".join(filter(None, (cell.limits, *refusals))).replace("|", "\\|")
    fields = (cell.family, cell.models, cell.pipelines, tasks, difference, rows, str(outcome.joined), limits)
    return "| " + " | ".join(fields) + " |"
