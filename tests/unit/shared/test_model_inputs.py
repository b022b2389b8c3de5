"""What of a job's `extra` is wrong, by the types that a model's pipeline declares."""

from __future__ import annotations

from typing import Any

import pytest

from shared.model_inputs import ModelInput, extra_faults
from shared.tasks import Task

INPUTS = (
    ModelInput(name="sound", schema={"type": "boolean"}, tasks=(Task.TEXT_TO_VIDEO,)),
    ModelInput(name="scale", schema={"type": "number"}, tasks=tuple(Task)),
    ModelInput(name="boxes", schema={"type": "array", "items": {"type": "object"}}, tasks=tuple(Task)),
)


@pytest.mark.parametrize(
    ("extra", "faults"),
    [
        ({}, []),
        ({"scale": 1, "boxes": [{"id": 1}], "sound": True}, []),
        ({"scale": "1"}, ["extra.scale: '1' is not of type 'number'"]),
        ({"scale": True}, ["extra.scale: True is not of type 'number'"]),
        ({"boxes": [{}, 2]}, ["extra.boxes[1]: 2 is not of type 'object'"]),
        (
            {"boxes": {}, "volume": 3},
            [
                "extra.boxes: {} is not of type 'array'",
                "extra.volume: model 'm' takes no such input for text_to_video",
            ],
        ),
    ],
)
def test_faults_name_the_input_and_the_place(extra: dict[str, Any], faults: list[str]) -> None:
    found = list(extra_faults(extra, INPUTS, Task.TEXT_TO_VIDEO, "m"))
    assert [fault.message for fault in found] == faults
    assert [fault.param for fault in found] == [f"extra.{name}" for name in extra][-len(faults) or len(extra) :]


def test_an_input_of_another_task_is_none_of_this_one() -> None:
    (fault,) = extra_faults({"sound": True}, INPUTS, Task.IMAGE_TO_VIDEO, "m")
    assert fault.message == "extra.sound: model 'm' takes no such input for image_to_video"
