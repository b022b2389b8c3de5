"""Jobs whose last steps a refiner makes: which models have one, by default and on request, and what excludes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.jobs.request import parse
from api.jobs.resolve import resolve_for_model
from shared.config.controls import ControlSpec
from shared.config.model_spec import ModelSpec
from shared.config.refiners import RefinerSpec
from shared.errors import InvalidRequest
from shared.job import Job
from shared.tasks import Task

TASKS = (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT)
FROM_IMAGE = {"image": "i", "task": "image_to_image"}
NET = {"id": "edges", "image": "i"}
XL = "StableDiffusionXLPipeline"
LISTED = {"timesteps": [900 - 30 * at for at in range(30)]}


def a_model(folder: Path, pipeline: str | None = XL, start: float | None = 0.8) -> ModelSpec:
    """A model in a folder, on the hub without a class; with a refiner unless `start` is None."""
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    nets = (ControlSpec(id="edges", source="x"),)
    refiner = None if start is None else RefinerSpec(source="acme/refiner", start=start)
    source = str(folder) if pipeline else "acme/model"
    return ModelSpec(id="m", source=source, tasks=TASKS, control=nets, refiner=refiner)


def job_of(spec: ModelSpec, body: dict[str, Any]) -> Job:
    return resolve_for_model(parse({"model": "m", "prompt": "x", **body}), spec, "t", 0)


@pytest.mark.parametrize(
    ("start", "body", "chosen"),
    [
        (None, {}, None),
        (None, {"refiner_start": 1}, None),
        (0.8, {}, 0.8),
        (0.8, {"refiner_start": 0.5}, 0.5),
        (0.8, {"refiner_start": 1}, None),
        (1.0, {}, None),
        (1.0, {"refiner_start": 0.7}, 0.7),
        (0.8, {"steps": 5}, 0.8),
        (0.8, {"steps": 4}, None),
        (0.1, {"steps": 9}, None),
        (0.8, {"steps": 4, "refiner_start": 0.75}, 0.75),
        (0.8, {"denoising_end": 0.8}, None),
        (0.8, {"output_format": "latent"}, None),
        (0.8, {"scheduler_options": LISTED}, None),
        (0.8, {"scheduler_options": LISTED, "refiner_start": 0.6}, 0.6),
        (0.8, {"controls": [NET]}, 0.8),
        (0.8, FROM_IMAGE, None),
        (0.8, {**FROM_IMAGE, "controls": [NET]}, None),
        (0.8, {**FROM_IMAGE, "refiner_start": 0.6}, 0.6),
        (0.8, {**FROM_IMAGE, "denoising_start": 0.6}, None),
        (0.8, {"image": "i", "mask": "i"}, None),
        (0.8, {"image": "i", "mask": "i", "refiner_start": 1}, None),
    ],
)
def test_a_job_has_the_refiner_that_it_asks_for_or_that_of_the_model(
    start: float | None, body: dict[str, Any], chosen: float | None, tmp_path: Path
) -> None:
    assert job_of(a_model(tmp_path, start=start), body).refiner_start == chosen


@pytest.mark.parametrize(
    ("pipeline", "start", "body", "message"),
    [
        (XL, None, {}, "refiner_start: model 'm' has no refiner"),
        ("FluxPipeline", 0.8, {}, "refiner_start: model 'm' has no refiner for text_to_image"),
        (XL, 0.8, {"image": "i", "mask": "i"}, "refiner_start: model 'm' has no refiner for inpaint"),
        (XL, 0.8, {**FROM_IMAGE, "controls": [NET]}, "has no refiner for image_to_image with control nets"),
        (XL, 0.8, {"denoising_end": 0.8}, "refiner_start excludes denoising_end"),
        (
            XL,
            0.8,
            {**FROM_IMAGE, "denoising_start": 0.8},
            "refiner_start excludes denoising_start",
        ),
        (XL, 0.8, {"output_format": "latent"}, "refiner_start excludes output_format latent"),
        (XL, 0.8, {**FROM_IMAGE, "strength": 0.3}, "no step is before 0.6; use a strength above 0.4"),
        (XL, 0.8, {"refiner_start": 0}, "refiner_start: Input should be greater than 0"),
        (XL, 0.8, {"refiner_start": 1.1}, "refiner_start: Input should be less than or equal to 1"),
        (XL, 0.8, {"refiner_start": True}, "refiner_start: Input should be a valid number"),
        (XL, 0.8, {"refiner_start": "0.8"}, "refiner_start: Input should be a valid number"),
    ],
)
def test_a_refiner_that_a_job_cannot_have_is_refused(
    pipeline: str, start: float | None, body: dict[str, Any], message: str, tmp_path: Path
) -> None:
    spec = a_model(tmp_path, pipeline, start)
    with pytest.raises(InvalidRequest) as error:
        job_of(spec, {"refiner_start": 0.6, **body})
    assert error.value.param == "refiner_start"
    assert message in error.value.message


@pytest.mark.parametrize(
    ("strength", "steps", "is_refused"),
    [(0.2, 20, True), (0.2000001, 20, True), (0.25, 20, False), (0.25, 7, True), (0.3, 7, False), (0.3, 3, True)],
)
def test_a_strength_that_leaves_no_step_before_the_refiner_is_refused(
    strength: float, steps: int, is_refused: bool, tmp_path: Path
) -> None:
    """The steps that a strength leaves are rounded down."""
    body = {**FROM_IMAGE, "refiner_start": 0.8, "strength": strength, "steps": steps}
    if not is_refused:
        assert job_of(a_model(tmp_path), body).refiner_start == 0.8
        return
    with pytest.raises(InvalidRequest, match=r"no step is before 0.8; use a strength above 0.2, or more steps"):
        job_of(a_model(tmp_path), body)


def test_a_model_on_the_hub_is_believed_to_leave_steps_to_its_refiner(tmp_path: Path) -> None:
    """Its worker reads its files."""
    assert job_of(a_model(tmp_path, None), {"refiner_start": 0.6}).refiner_start == 0.6


def test_a_refined_job_takes_all_its_steps(tmp_path: Path) -> None:
    """By these the queue estimates when it ends."""
    spec = a_model(tmp_path)
    assert job_of(spec, {"steps": 20}).computed_steps_per_image == 20
    assert (
        job_of(spec, {**FROM_IMAGE, "steps": 20, "strength": 0.5, "refiner_start": 0.8}).computed_steps_per_image == 10
    )
