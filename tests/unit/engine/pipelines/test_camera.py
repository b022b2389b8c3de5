"""The path of a camera in `extra`: what is refused, and what stands for a part that is not given."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import pytest
from harness.engine import a_job
from pydantic import JsonValue

from shared.errors import UnusableInput
from shared.job import InputRef
from shared.tasks import Task
from worker.engine.pipelines.camera import camera_arguments
from worker.engine.pipelines.extra_inputs import describe_inputs, extra_arguments
from worker.engine.pipelines.task_pipelines import call_parameters

PIPELINE = object.__new__(diffusers.SanaWMPipeline)
POSE: list[JsonValue] = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def camera(extra: dict[str, JsonValue], pipeline: Any = PIPELINE, sides: tuple[int, int] = (64, 32)) -> dict[str, Any]:
    """Return the arguments for a job of 9 frames of 64 x 32 pixels, whose image has other sides."""
    width, height = sides
    image = InputRef(id="in_1", key="k", content_type="image/png", bytes=1, width=width, height=height)
    fields = {"task": Task.IMAGE_TO_VIDEO, "frames": 9, "fps": 8, "width": 64, "height": 32, "images": (image,)}
    job = a_job("one", **fields, extra=extra)
    return extra_arguments(pipeline, job) | camera_arguments(job, call_parameters(pipeline))


def test_a_camera_without_a_path_stands_still_and_sees_90_degrees() -> None:
    assert camera({}) == {"action": "none-8", "intrinsics": [32, 32, 32, 16]}


def test_other_pipelines_have_no_camera() -> None:
    assert camera({}, object.__new__(diffusers.WanImageToVideoPipeline)) == {}


def test_a_path_is_an_action_or_a_list_of_matrices() -> None:
    assert camera({"action": "w-4, NONE-4"})["action"] == "w-4, NONE-4"
    moved = camera({"c2w": [POSE] * 9})
    assert np.shape(moved["c2w"]) == (9, 4, 4)
    assert "action" not in moved


@pytest.mark.parametrize(
    ("sides", "lens"), [((64, 32), [50, 40, 30, 20]), ((128, 64), [25, 20, 15, 10]), ((128, 128), [25, 20, 15, -6])]
)
def test_a_lens_is_of_the_image_that_was_sent(sides: tuple[int, int], lens: list[float]) -> None:
    """It is scaled and cropped with the image."""
    assert camera({"intrinsics": [50, 40, 30, 20]}, sides=sides)["intrinsics"].tolist() == lens
    assert camera({"intrinsics": [[50, 40, 30, 20]] * 9}, sides=sides)["intrinsics"].tolist() == [lens] * 9


@pytest.mark.parametrize(
    ("extra", "param", "reason"),
    [
        ({"action": "w-8", "c2w": [POSE] * 9}, "c2w", "not both"),
        ({"action": "w-7"}, "action", "8 poses, fewer than the 9"),
        ({"action": "q-8"}, "action", "it must be like"),
        ({"action": ""}, "action", "it must be like"),
        ({"action": "w-99999"}, "action", "at most 10000"),
        ({"action": "w-999999999999"}, "action", "it must be like"),
        ({"action": 8}, "action", "not valid"),
        ({"c2w": [POSE] * 8}, "c2w", "8 poses, fewer than the 9"),
        ({"c2w": POSE}, "c2w", "matrices of 4 x 4"),
        ({"c2w": [POSE[:3]] * 9}, "c2w", "matrices of 4 x 4"),
        ({"c2w": [*[POSE] * 8, [[1], [0, 1]]]}, "c2w", "the same length"),
        ({"c2w": "w"}, "c2w", "not valid"),
        ({"intrinsics": [1, 2, 3]}, "intrinsics", "fx, fy, cx, cy"),
        ({"intrinsics": [0, 1, 1, 1]}, "intrinsics", "fx, fy, cx, cy"),
        ({"intrinsics": [[1, 1, 1, 1]] * 8}, "intrinsics", "8 poses"),
    ],
)
def test_a_path_that_does_not_fit_is_refused_by_name(extra: dict[str, JsonValue], param: str, reason: str) -> None:
    with pytest.raises(UnusableInput, match=reason) as refused:
        camera(extra)
    assert refused.value.param == f"extra.{param}"


def test_arrays_are_described_as_lists_of_numbers() -> None:
    described = {one.name: one.type_schema for one in describe_inputs({Task.IMAGE_TO_VIDEO: PIPELINE})}
    numbers = {"type": "array", "items": {"type": "number"}}
    assert numbers in described["intrinsics"]["anyOf"]
    assert {"type": "array", "items": {"type": "array", "items": numbers}} in described["c2w"]["anyOf"]
