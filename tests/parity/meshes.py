"""The rows of meshes: models of hy3dgen's own classes, against its own pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.engine import EngineHarness
from harness.meshes import difference, mesh_job, plain_mesh, spec_of
from parity.running import TOLERANCE, Joining
from tiny.meshes import save_mesh_model


@dataclass(frozen=True)
class MeshRow:
    """A variant of the model, by the `options` of its tiny folder, whose jobs have `views` images each."""

    models: str
    options: Mapping[str, bool] = field(default_factory=dict)
    views: int = 1


@dataclass(frozen=True)
class MeshOutcome:
    """The largest difference of vertices, the meshes in each denoiser forward, and the jobs that joined."""

    largest_difference: float
    rows: list[int]
    joined: int


ROWS = (
    MeshRow("Hunyuan3D-2"),
    MeshRow("Hunyuan3D-2 Turbo", {"turbo": True}),
    MeshRow("Hunyuan3D-2mv (several views)", {"views": True}, views=3),
)


def run(row: MeshRow, folder: Path) -> MeshOutcome:
    """Run jobs with different images, steps and guidance, of which one joins; raises `AssertionError`."""
    save_mesh_model(folder, **row.options)
    first = [mesh_job(f"job-{steps}", row.views, steps=steps, guidance_scale=steps / 2) for steps in (3, 4, 6)]
    late = mesh_job("late", row.views, steps=3)
    recorder = Joining()
    harness = EngineHarness(spec_of(folder), recorder=recorder)
    recorder.submit_more = lambda: harness.submit_prepared(late)
    harness.submit(*first)
    jobs = [*first, late]
    with harness.started():
        recorder.wait_for([job.id for job in first])
        recorder.wait_for([late.id])
    failed = {job.id: error.message for job in jobs if (error := recorder.finished[job.id].error) is not None}
    assert not failed
    assert recorder.rows[0] == len(first), recorder.rows
    assert recorder.finished[late.id].batching.max_jobs > 1, recorder.rows
    largest = max(difference(recorder.meshes[job.id, 0], plain_mesh(folder, job)) for job in jobs)
    assert largest <= TOLERANCE, largest
    return MeshOutcome(largest, recorder.rows, 1)
