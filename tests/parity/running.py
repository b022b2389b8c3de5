"""Runs a cell: its jobs together through a whole engine, and each by itself through the unmodified pipeline, as PIL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.engine import EngineHarness, EventRecorder, a_job, a_spec
from parity.cells import Cell
from parity.devices import devices_difference
from parity.plain import PlainPipeline, PlainResult
from parity.variants import Difference, blocks_difference, int8_difference
from tiny import controls

from shared.architectures.registry import CONTROL_PIPELINES
from shared.config.controls import Control, ControlSpec
from shared.config.model_index import index_file, read_index
from shared.config.step_schedules import StepSchedule
from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines.inpainting import Paste
from worker.engine.protocol import EngineEvent, ForwardDone

TOLERANCE = 1e-4  # of the image's range, before conversion to 8 bits
CACHED_STEPS, FEWEST_CACHED_STEPS = 14, 10  # of fewer steps none is skipped
ALIKE = 5e-3  # a comparison with images that differ by less proves nothing
_VARIANTS: dict[str, tuple[Difference, Difference]] = {}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell on the page. `rows` are the images in each denoiser forward, in order.

    `skipped` are the steps that step caching skipped, of a job with reused outputs and of one with linear residuals,
    and `cached_difference` is the largest of these two to their solo runs. `controlled_difference` is that of jobs with
    control images, None without control nets for the pipeline.
    `int8`, `blocks` and `two_devices` are measured once for each model.
    """

    largest_difference: float
    rows: list[int]
    tasks: list[str]
    joined: int
    refusals: Mapping[str, str]
    skipped: list[int]
    cached_difference: float
    controlled_difference: float | None
    int8: Difference
    blocks: Difference
    two_devices: Difference


@dataclass
class Joining(EventRecorder):
    """A recorder that submits more jobs after the first forward."""

    submit_more: Callable[[], None] = lambda: None
    submitted_after: int | None = field(default=None)

    def on_event(self, event: EngineEvent) -> None:
        super().on_event(event)
        if isinstance(event, ForwardDone) and self.submitted_after is None:
            self.submitted_after = len(self.forwards)
            self.submit_more()


def run(cell: Cell, folder: Path, *, variants: bool = False) -> Outcome:
    """Run a cell in `folder` and check its expectations; raises `AssertionError`.

    With `variants` also with control images, int8 weights, compiled blocks and over two devices, which takes as long
    again.
    """
    with cell.around(), as_floats():
        source = folder if index_file(folder) is not None else cell.build(cell.tiny, folder)
        recorder = _together(cell, source)
        jobs = [*cell.first_jobs(), *cell.joining_jobs()]
        failed = {job.id: error.message for job in jobs if (error := recorder.finished[job.id].error) is not None}
        assert not failed
        plain = plain_results(source, jobs)
        largest = compare(recorder, plain)
        refusals = _refused(cell, source)
        skipped, cached_difference = _cached(cell, source, CACHED_STEPS if variants else FEWEST_CACHED_STEPS)
        controlled = _controlled(cell, source) if variants else None
        int8, blocks, two_devices = _variants(cell, source, plain) if variants else ("", "", "")
    assert recorder.rows[0] == cell.first_rows, f"{recorder.rows}: {recorder.finished[jobs[0].id].batching}"
    late = [recorder.finished[job.id].batching for job in cell.joining_jobs()]
    assert all(batching.max_jobs > 1 for batching in late), f"{recorder.rows}: joined no batch: {late}"
    tasks = sorted({job.task.value for job in jobs})
    differences = (cached_difference, controlled, int8, blocks, two_devices)
    return Outcome(largest, recorder.rows, tasks, len(late), refusals, skipped, *differences)


@contextmanager
def as_floats() -> Iterator[None]:
    """Return images from the engine as floats of 0 to 1: 8 bits would hide small differences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.engine.pipelines.call_results.to_pixels", _floats)
        patch.setattr("worker.engine.pipelines.call_results.to_frames", _floats)
        patch.setattr(Paste, "__call__", _unpasted)  # of sample jobs, whose masks keep what they do not repaint
        yield


def _unpasted(_paste: Paste, image: np.ndarray) -> np.ndarray:
    return image


def _floats(image: torch.Tensor) -> np.ndarray:
    return image.float().cpu().numpy()


def _together(cell: Cell, source: Path) -> Joining:
    spec = a_spec(source, tasks=cell.tasks, **({"max_batch": 16} | dict(cell.spec)))
    recorder = Joining()
    harness = EngineHarness(spec, recorder=recorder)

    recorder.submit_more = lambda: harness.submit_prepared(*cell.joining_jobs())
    jobs = cell.first_jobs()
    harness.submit(*jobs)
    with harness.started():
        recorder.wait_for([job.id for job in jobs])
        assert recorder.forwards, f"no forward at all: {[recorder.finished[job.id].error for job in jobs]}"
        recorder.wait_for([job.id for job in cell.joining_jobs()])
    return recorder


def _refused(cell: Cell, source: Path) -> dict[str, str]:
    """Run the jobs that are known to fail, and return their errors."""
    errors = {}
    for name, fields in cell.refused.items():
        job = a_job(name, **fields)
        error = EngineHarness(a_spec(source, tasks=(job.task,))).run(job).finished[name].error
        assert error is not None, f"{name}: it is supported now"
        errors[name] = error.message
    return errors


def _cached(cell: Cell, source: Path, steps: int) -> tuple[list[int], float]:
    """Run two jobs with different step caches and a job without one together, and each by itself in the engine."""
    if not cell.caches_steps:
        return [], 0.0
    first, *others = cell.jobs.values()
    schedules = {"reuse": StepSchedule(every=2, order="reuse"), "linear": StepSchedule(every=3, of="residual")}
    fields = {**first, "n": 1, "steps": steps}
    ours = [a_job(name, **{**fields, "step_cache": schedule}) for name, schedule in schedules.items()]
    mates = [a_job("mate", **{**fields, **others[0], "n": 1})] if others else []
    spec = a_spec(source, tasks=cell.tasks, **({"max_batch": 16} | dict(cell.spec)))
    together = EngineHarness(spec).run(*ours, *mates)
    solo = EngineHarness(spec)
    with solo.started():
        for job in ours:
            solo.submit(job)
            solo.recorder.wait_for([job.id])
    differences = [np.abs(together.images[key] - image).max() for key, image in solo.recorder.images.items()]
    assert differences, [solo.recorder.finished[job.id].error for job in ours]
    assert max(differences) <= TOLERANCE, f"step caching: {differences}"
    batching = [together.finished[job.id].batching for job in ours]
    assert all(one.max_jobs > 1 and one.skipped_steps > 0 for one in batching), f"step caching: {batching}"
    return [one.skipped_steps for one in batching], float(max(differences))


def _controlled(cell: Cell, source: Path) -> float | None:
    """Run jobs with different control images together, and each by itself in the engine."""
    pipeline = read_index(source)["_class_name"]
    if Task.TEXT_TO_IMAGE not in cell.tasks or pipeline not in CONTROL_PIPELINES:
        return None
    net = source.with_name(f"{source.name}-control")
    if not net.exists():
        controls.save(source, net, 1)
    fields = {**next(iter(cell.jobs.values())), "n": 1}
    ours = [
        a_job(f"control{at}", **{**fields, "seed": at, "controls": (Control(id="net", scale=0.5 + at / 4),)})
        for at in range(4)
    ]
    nets = (ControlSpec(id="net", source=str(net)),)
    spec = a_spec(source, control=nets, **({"tasks": cell.tasks} | dict(cell.spec)))
    together = EngineHarness(spec).run(*ours)
    solo = EngineHarness(spec)
    with solo.started():
        for job in ours:
            solo.submit(job)
            solo.recorder.wait_for([job.id])
    off = [float(np.abs(together.images[key] - image).max()) for key, image in solo.recorder.images.items()]
    assert off, [solo.recorder.finished[job.id].error for job in ours]
    assert max(off) <= TOLERANCE, f"control: {off}"
    assert together.rows[0] == len(ours), f"control: {together.rows}"
    return max(off)


def _variants(
    cell: Cell, source: Path, plain: dict[tuple[str, int], PlainResult]
) -> tuple[Difference, Difference, Difference]:
    """Return the differences with int8 weights, compiled blocks and two devices, of the first cell of a model."""
    if cell.tiny not in _VARIANTS:
        _VARIANTS[cell.tiny] = int8_difference(cell, source), blocks_difference(cell, source, plain)
    differences = (*_VARIANTS[cell.tiny], devices_difference(cell, source))
    for name, difference in zip(("int8", "blocks", "two devices"), differences, strict=True):
        assert isinstance(difference, str) or difference <= TOLERANCE, f"{name}: {difference}"
    return differences


def plain_results(source: Path, jobs: list[Job]) -> dict[tuple[str, int], PlainResult]:
    """Return every result generated by itself, by diffusers only."""
    pipeline = PlainPipeline(source)
    return {(job.id, at): result for job in jobs for at, result in enumerate(pipeline.results(job))}


def compare(recorder: EventRecorder, plain: dict[tuple[str, int], PlainResult]) -> float:
    assert recorder.images.keys() == plain.keys()
    off = {key: expected.difference(recorder.outputs[key]) for key, expected in plain.items()}
    assert max(off.values()) <= TOLERANCE, off
    same = [
        (one, other)
        for at, one in enumerate(plain)
        for other in list(plain)[:at]
        if plain[one].values.shape == plain[other].values.shape
        and np.abs(plain[one].values - plain[other].values).max() < ALIKE
    ]
    assert not same, f"images that are alike prove nothing: {same}"
    return max(off.values())
