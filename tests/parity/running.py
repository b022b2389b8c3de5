"""Runs a cell: its jobs together through a whole engine, and each by itself through the bare pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from harness.engine import Recorder, Room, a_job, a_spec, input_files
from parity.cells import Cell

from shared.job import Job
from worker.engine import EngineEvent, ForwardDone, Output
from worker.engine.pipelines.call_arguments import arguments_for, make_results, make_scheduler, set_guidance
from worker.engine.pipelines.input_images import prepare_inputs
from worker.engine.pipelines.task_pipelines import pipeline_for

TOLERANCE = 1e-4  # of the picture's range, before it becomes 8 bits
ALIKE = 5e-3  # pictures that differ by less would prove nothing


@dataclass(frozen=True)
class Outcome:
    """What the page tells of a cell. `rows` are the pictures in each denoiser forward, in order."""

    largest_difference: float
    rows: list[int]
    tasks: list[str]
    joined: int
    refusals: Mapping[str, str]


@dataclass
class Joining(Recorder):
    """A listener that has more jobs seated once the first forward is done."""

    seat: Callable[[], None] = lambda: None
    seated_after: int | None = field(default=None)

    def on_event(self, event: EngineEvent) -> None:
        super().on_event(event)
        if isinstance(event, ForwardDone) and self.seated_after is None:
            self.seated_after = len(self.facts)
            self.seat()


def run(cell: Cell, folder: Path) -> Outcome:
    """Run a cell in `folder` and check all that it promises; raises `AssertionError` where that does not hold."""
    with cell.around(), as_floats():
        source = folder if (folder / "model_index.json").exists() else cell.build(cell.tiny, folder)
        heard = _together(cell, source)
        jobs = [*cell.seated(), *cell.joiners()]
        failed = {job.id: error.message for job in jobs if (error := heard.ended[job.id].error) is not None}
        assert not failed
        largest = _compare(heard, _alone(source, jobs))
        refusals = _refused(cell, source)
    assert heard.rows[0] == cell.first_rows, f"{heard.rows}: {heard.ended[jobs[0].id].batching}"
    late = [heard.ended[job.id].batching for job in cell.joiners()]
    assert all(batching.max_jobs > 1 for batching in late), f"{heard.rows}: joined nobody: {late}"
    return Outcome(largest, heard.rows, sorted({job.task.value for job in jobs}), len(late), refusals)


@contextmanager
def as_floats() -> Iterator[None]:
    """Let pictures leave the engine as floats of 0 to 1: 8 bits would hide small differences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.engine.pipelines.call_arguments.to_pixels", _floats)
        patch.setattr("worker.engine.pipelines.call_arguments.to_frames", _floats)
        yield


def _floats(image: torch.Tensor) -> np.ndarray:
    return image.float().cpu().numpy()


def _together(cell: Cell, source: Path) -> Joining:
    spec = a_spec(source, tasks=cell.tasks, **({"max_batch": 16} | dict(cell.spec)))
    heard = Joining()
    room = Room(spec, recorder=heard)

    heard.seat = lambda: room.seat_now(*cell.joiners())
    jobs = cell.seated()
    room.seat(*jobs)
    with room.started():
        heard.wait_for([job.id for job in jobs])
        assert heard.facts, f"no forward at all: {[heard.ended[job.id].error for job in jobs]}"
        heard.wait_for([job.id for job in cell.joiners()])
    return heard


def _refused(cell: Cell, source: Path) -> dict[str, str]:
    """Run the jobs that are known to fail, and return what each failed with."""
    errors = {}
    for name, fields in cell.refused.items():
        job = a_job(name, **fields)
        error = Room(a_spec(source, tasks=(job.task,))).run(job).ended[name].error
        assert error is not None, f"{name}: by now it is supported"
        errors[name] = error.message
    return errors


def _alone(source: Path, jobs: list[Job]) -> dict[tuple[str, int], Output]:
    """Make every picture by itself, with nothing but diffusers between its arguments and its pixels."""
    loaded: Any = DiffusionPipeline.from_pretrained(source, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    first_scheduler = loaded.scheduler
    pictures = {}
    for job in jobs:
        pipeline = pipeline_for(job.task, loaded)
        pipeline.set_progress_bar_config(disable=True)
        own = make_scheduler(job.scheduler or type(first_scheduler).__name__, first_scheduler)
        inputs = prepare_inputs(job, input_files(job))
        set_guidance(pipeline, job)
        for index in range(job.n):
            pipeline.scheduler = type(own).from_config(own.config)
            with torch.no_grad():
                results = make_results(pipeline, arguments_for(pipeline, job, index, inputs))
            for part, made in enumerate(results):
                pictures[job.id, index * len(results) + part] = made
    return pictures


def _compare(heard: Recorder, solo: dict[tuple[str, int], Output]) -> float:
    assert heard.pictures.keys() == solo.keys()
    off = {key: _difference(heard.made[key], expected) for key, expected in solo.items()}
    assert max(off.values()) <= TOLERANCE, off
    same = [
        (one, other)
        for at, one in enumerate(solo)
        for other in list(solo)[:at]
        if solo[one].pixels.shape == solo[other].pixels.shape
        and np.abs(solo[one].pixels - solo[other].pixels).max() < ALIKE
    ]
    assert not same, f"pictures that are alike prove nothing: {same}"
    return max(off.values())


def _difference(made: Output, expected: Output) -> float:
    """Return the largest difference of two results, in parts of the range of their pixels and of their sound."""
    assert made.pixels.shape == expected.pixels.shape
    off = float(np.abs(made.pixels - expected.pixels).max())
    assert (made.audio is None) == (expected.audio is None)
    if made.audio is None or expected.audio is None:
        return off
    assert made.audio.rate == expected.audio.rate
    return max(off, float(np.abs(made.audio.samples - expected.audio.samples).max()))
