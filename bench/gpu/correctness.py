"""`python -m bench.gpu.correctness DTYPE`: tiny models of each family through a whole engine on the device.

The jobs are those of the parity grid. For each family: jobs together with late ones that join, against each by itself
in the engine; in float32 also against unmodified diffusers, in 16 bits beside the noise of the pipeline's own batches;
reproducible jobs in company and by themselves, bit by bit; a canceled job and its batch mates.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.engine import EngineHarness, a_spec
from parity.cells import Cell
from parity.grid import GRID
from parity.plain import PlainPipeline
from parity.running import Joining, as_floats
from tiny import registry

from bench.gpu.stage import DEVICE, DRY, Figures, Stage
from shared.job import Job
from shared.runtime import log

FAMILIES = ("sd", "flux", "z-image", "sdxl", "sd3-16", "qwen-image", "wan-2.1-t2v", "flux-2-klein", "sana")
COMPARED_WITH_DIFFUSERS = 2
OF_ONE_LENGTH = ("a dog", "a cat", "a fox")
LONG_STEPS = 60  # of the job that is canceled

Pixels = np.ndarray[Any, Any]


class Family:
    """An engine with the tiny model of one cell."""

    def __init__(self, cell: Cell, dtype: str, folder: Path) -> None:
        self.cell = cell
        self.source = registry.save_tiny(cell.tiny, folder / cell.tiny)
        self.recorder = Joining()
        spec = a_spec(self.source, tasks=cell.tasks, dtype=dtype, **({"max_batch": 16} | dict(cell.spec)))
        self.harness = EngineHarness(spec, recorder=self.recorder, device=DEVICE)

    def run(self, jobs: Sequence[Job]) -> None:
        """Run jobs together; raises the first error."""
        self.harness.submit(*jobs)
        self._wait(jobs)

    def _wait(self, jobs: Sequence[Job]) -> None:
        self.recorder.wait_for([job.id for job in jobs])
        for job in jobs:
            if (error := self.recorder.finished[job.id].error) is not None:
                raise RuntimeError(f"{job.id}: {error.message}")

    def together(self, figures: Figures) -> None:
        """Run all jobs of the cell, with those that join after the first forward."""
        late = self.cell.joining_jobs()
        self.recorder.submit_more = lambda: self.harness.submit_prepared(*late)
        self.run(self.cell.first_jobs())
        self._wait(late)
        figures["rows"] = f"{self.recorder.rows[0]} of {self.cell.first_rows}"
        batching = [self.recorder.finished[job.id].batching for job in (*self.cell.first_jobs(), *late)]
        figures["solo_reason"] = next((one.solo_reason for one in batching if one.solo_reason), None)
        figures["joined"] = all(one.max_jobs > 1 for one in batching[-len(late) :])

    def against_solo(self, figures: Figures) -> None:
        jobs = [*self.cell.first_jobs(), *self.cell.joining_jobs()]
        for job in jobs:
            self.run([_named(job, f"solo {job.id}")])
        off = max(self._difference(job.id, f"solo {job.id}") for job in jobs)
        figures["fused_vs_solo"] = f"{off:.1e}"

    def against_diffusers(self, figures: Figures) -> None:
        plain = PlainPipeline(self.source, DEVICE)
        off = 0.0
        for job in self.cell.first_jobs()[:COMPARED_WITH_DIFFUSERS]:
            for at, result in enumerate(plain.results(job)):
                off = max(off, result.difference(self.recorder.outputs[job.id, at]))
        figures["vs_diffusers"] = f"{off:.1e}"

    def alike(self, figures: Figures) -> None:
        """Run three jobs alike but for seed and prompt, also reproducible: in company, and each by itself."""
        first = self.cell.first_jobs()[0]
        for reproducible in (False, True):
            kind, started = ("reproducible" if reproducible else "ordinary"), len(self.recorder.rows)
            changes = [
                {"seed": at, "prompt": text, "n": 1, "reproducible": reproducible}
                for at, text in enumerate(OF_ONE_LENGTH)
            ]
            jobs = [first.model_copy(update=change) for change in changes]
            self.run([_named(job, f"{kind} among {job.seed}") for job in jobs])
            figures[f"{kind}_rows"] = max(self.recorder.rows[started:])
            for job in jobs:
                self.run([_named(job, f"{kind} alone {job.seed}")])
            pairs = [(f"{kind} among {job.seed}", f"{kind} alone {job.seed}") for job in jobs]
            off = max(self._difference(*pair) for pair in pairs)
            figures[kind] = "bit-identical" if off == 0 else f"{off:.1e}"

    def noise_of_batches(self, figures: Figures, dtype: str) -> None:
        """Compare the plain pipeline's batched call for the same three prompts with its own single calls."""
        plain = PlainPipeline(self.source, DEVICE, getattr(torch, dtype))
        first = self.cell.first_jobs()[0]
        jobs = [first.model_copy(update={"seed": at, "n": 1, "prompt": text}) for at, text in enumerate(OF_ONE_LENGTH)]
        figures["plain_batch_vs_single"] = f"{plain.noise_of_batches(jobs):.1e}"

    def canceled(self, figures: Figures) -> None:
        """Cancel one of three jobs after a forward; the others must get the images that they get by themselves."""
        first, *others = [job for job in self.cell.first_jobs() if job.n == 1][:3]
        started = len(self.recorder.forwards)
        doomed = _named(first.model_copy(update={"steps": LONG_STEPS}), "canceled")
        self.recorder.submit_more = lambda: self.harness.engine.cancel("canceled")
        self.recorder.submitted_after = None
        mates = [_named(job, f"mate {job.id}") for job in others]
        self.harness.submit(doomed, *mates)
        self.recorder.wait_for(["canceled", *(job.id for job in mates)])
        off = max(self._difference(f"mate {job.id}", f"solo {job.id}") for job in others)
        figures["canceled"] = self.recorder.finished["canceled"].canceled
        figures["forwards_after_cancel"] = len(self.recorder.forwards) - started
        figures["mates_vs_solo"] = f"{off:.1e}"

    def _images(self, name: str) -> list[Pixels]:
        return [image for (key, _), image in sorted(self.recorder.images.items()) if key == name]

    def _difference(self, one: str, other: str) -> float:
        pairs = zip(self._images(one), self._images(other), strict=True)
        return max(float(np.abs(left - right).max()) for left, right in pairs)


def _named(job: Job, name: str) -> Job:
    return job.model_copy(update={"id": name})


def check(cell: Cell, dtype: str, figures: Figures) -> None:
    with tempfile.TemporaryDirectory() as folder, cell.around(), as_floats():
        family = Family(cell, dtype, Path(folder))
        with family.harness.started():
            family.together(figures)
            family.against_solo(figures)
            family.alike(figures)
            family.canceled(figures)
            if dtype == "float32":
                family.against_diffusers(figures)
            else:
                family.noise_of_batches(figures, dtype)


def main(dtype: str) -> None:
    stage = Stage("correctness")
    log.configure("WARNING")
    stage.wait_for_turn()
    for tiny in FAMILIES[:1] if DRY else FAMILIES:
        cell = next(cell for cell in GRID if cell.tiny == tiny)
        stage.run(partial(check, cell, dtype), 8, family=tiny, dtype=dtype)


if __name__ == "__main__":
    main(sys.argv[1])
