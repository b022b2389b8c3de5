"""Jobs that denoise an image in parts: which models take them, and what the other fields have to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.jobs.request import parse
from api.jobs.resolve import resolve_for_model
from shared.config.controls import ControlSpec
from shared.config.model_spec import ModelSpec
from shared.errors import InvalidRequest
from shared.tasks import Task

TASKS = (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT)
FROM_IMAGE = {"image": "i", "task": "image_to_image"}
NET = {"id": "edges", "image": "i"}


def a_model(folder: Path, pipeline: str | None) -> ModelSpec:
    """A model in a folder; on the hub without a class."""
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    nets = (ControlSpec(id="edges", source="x"),)
    return ModelSpec(id="m", source=str(folder) if pipeline else "acme/model", tasks=TASKS, control=nets)


def fault_of(spec: ModelSpec, body: dict[str, Any]) -> str | None:
    """Return the field that is at fault."""
    try:
        resolve_for_model(parse({"model": "m", "prompt": "x", **body}), spec, "t", 0)
    except InvalidRequest as error:
        return error.param
    return None


@pytest.mark.parametrize(
    ("pipeline", "body", "fault"),
    [
        ("StableDiffusionXLPipeline", {"denoising_end": 0.8}, None),
        ("StableDiffusionXLPipeline", {"denoising_start": 0.8}, "denoising_start"),
        ("StableDiffusionXLPipeline", {**FROM_IMAGE, "denoising_start": 0.2, "denoising_end": 0.8}, None),
        ("StableDiffusionXLImg2ImgPipeline", {**FROM_IMAGE, "denoising_start": 0.8}, None),
        ("StableDiffusionXLPipeline", {"image": "i", "mask": "i", "denoising_end": 0.8}, None),
        ("StableDiffusionXLPipeline", {"controls": [NET], "denoising_end": 0.8}, None),
        ("StableDiffusionXLPipeline", {**FROM_IMAGE, "controls": [NET], "denoising_end": 0.8}, "denoising_end"),
        ("StableDiffusionPipeline", {"denoising_end": 0.8}, "denoising_end"),
        ("FluxPipeline", {**FROM_IMAGE, "denoising_start": 0.8}, "denoising_start"),
        (None, {"denoising_end": 0.8}, None),
    ],
)
def test_models_whose_pipelines_have_the_arguments_take_them(
    pipeline: str | None, body: dict[str, Any], fault: str | None, tmp_path: Path
) -> None:
    """The files of a model on the hub are not read here: its worker decides."""
    assert fault_of(a_model(tmp_path, pipeline), body) == fault


@pytest.mark.parametrize("field", ["denoising_start", "denoising_end"])
@pytest.mark.parametrize("value", [0, 1, 1.5, -0.2, "0.8", True, float("nan")])
def test_a_part_is_between_0_and_1(field: str, value: Any, tmp_path: Path) -> None:
    spec = a_model(tmp_path, "StableDiffusionXLPipeline")
    assert fault_of(spec, {**FROM_IMAGE, field: value}) == field


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"denoising_start": 0.8, "denoising_end": 0.8}, "denoising_end"),
        ({"denoising_start": 0.8, "denoising_end": 0.5}, "denoising_end"),
        ({"denoising_start": 0.8, "strength": 0.5}, "strength"),
        ({"denoising_end": 0.8, "strength": 0.5}, None),
    ],
)
def test_fields_that_exclude_each_other(body: dict[str, Any], fault: str | None, tmp_path: Path) -> None:
    assert fault_of(a_model(tmp_path, "StableDiffusionXLPipeline"), {**FROM_IMAGE, **body}) == fault


def test_a_job_that_continues_has_no_strength(tmp_path: Path) -> None:
    """The queue expects one step of a part: how many there are depends on the noise scheduler."""
    spec = a_model(tmp_path, "StableDiffusionXLPipeline")
    request = parse({"model": "m", "prompt": "x", "steps": 30, **FROM_IMAGE, "denoising_start": 0.8})
    job = resolve_for_model(request, spec, "t", 0)
    assert job.strength is None
    assert job.computed_steps_per_image == 1
