"""Rows of a manifest are requests for the same again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from api.jobs.manifest import manifest_row
from api.jobs.request import JobRequest
from shared.config.candidates import BestOf
from shared.config.controls import Control
from shared.config.step_schedules import StepSchedule
from shared.job import InputRef, Job, State
from shared.job_record import JobRecord
from shared.tasks import OutputFormat, Task


def ref(name: str) -> InputRef:
    return InputRef(id=name, key=f"inputs/{name}", content_type="image/png", bytes=9, width=64, height=64)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"task": Task.IMAGE_TO_IMAGE, "images": (ref("in_1"),), "mask": ref("in_2")},
            {"image": "in_1", "mask": "in_2"},
        ),
        ({"task": Task.EDIT, "images": (ref("in_1"), ref("in_2"))}, {"images": ("in_1", "in_2")}),
        (
            {
                "controls": (Control(id="edges", kind="controlnet", scale=0.5, end=0.7),),
                "control_images": (ref("in_1"),),
            },
            {},
        ),
        ({"task": Task.TEXT_TO_VIDEO, "frames": 9, "fps": 8}, {"frames": 9, "fps": 8}),
        (
            {"task": Task.TEXT_TO_AUDIO, "width": 0, "height": 0, "duration_s": 4.0, "output_format": OutputFormat.WAV},
            {"duration_s": 4.0, "width": None, "output_format": "wav"},
        ),
        ({"n": 2, "best_of": BestOf(candidates=4, keep=2)}, {"n": 1}),
        ({"step_cache": StepSchedule(every=3), "layers": 3}, {"layers": 3}),
    ],
)
def test_a_row_is_a_request(make_job: Callable[..., Job], fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Inputs are named by their ids; what the request may not have is left out."""
    job = make_job(**fields)
    row = manifest_row(JobRecord(job=job, state=State.SUCCEEDED), ["a.png"])
    made = row.pop("made")
    request = {name: value for name, value in row.items() if name not in ("state", "job", "files", "flagged", "error")}
    del made["device_seconds"]
    again = JobRequest.model_validate({**request, **made})
    assert {name: getattr(again, name) for name in expected} == expected
    assert [(one.id, one.image, one.scale, one.end) for one in again.controls] == [
        (control.id, image.id, control.scale, control.end)
        for control, image in zip(job.controls, job.control_images, strict=True)
    ]
    same = ("prompt", "seed", "steps", "guidance_scale", "best_of", "step_cache")
    assert {name: getattr(again, name) for name in same} == {name: getattr(job, name) for name in same}
