"""Requests for sounds: the task that their fields choose, their length, and the fields that they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from api.jobs.job_builder import with_inputs
from api.jobs.request import parse, task_of
from api.jobs.request_images import Inputs
from api.jobs.resolve import resolve_for_model
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults, Limits
from shared.errors import InvalidRequest
from shared.job import InputRef, Job
from shared.signature import signature
from shared.tasks import OutputFormat, Task

SOUNDS = (Task.TEXT_TO_AUDIO, Task.AUDIO_TO_AUDIO, Task.AUDIO_INPAINT)
SPEC = ModelSpec(
    id="band", source="/band", tasks=SOUNDS, limits=Limits(max_duration_s=60), defaults=Defaults(duration_s=10)
)
PAINTER = ModelSpec(id="painter", source="/painter")
AUDIO = "in_" + "0" * 32


def resolved(spec: ModelSpec = SPEC, **fields: Any) -> Job:
    return resolve_for_model(parse({"model": spec.id, "prompt": "a waltz", **fields}), spec, "t", 0)


@pytest.mark.parametrize(
    ("fields", "task"),
    [
        ({}, Task.TEXT_TO_AUDIO),
        ({"duration_s": 5}, Task.TEXT_TO_AUDIO),
        ({"audio": AUDIO}, Task.AUDIO_TO_AUDIO),
        ({"audio": AUDIO, "strength": 0.5}, Task.AUDIO_TO_AUDIO),
        ({"audio": AUDIO, "repaint_end_s": 2}, Task.AUDIO_INPAINT),
        ({"audio": AUDIO, "repaint_start_s": 2}, Task.AUDIO_INPAINT),
    ],
)
def test_the_fields_choose_the_task(fields: dict[str, Any], task: Task) -> None:
    assert resolved(**fields).task is task


def test_a_sound_has_a_length_and_no_sides() -> None:
    job = resolved()
    assert (job.width, job.height, job.duration_s, job.output_format) == (0, 0, 10, OutputFormat.WAV)
    assert resolved(duration_s=3).duration_s == 3
    assert resolved(PAINTER).duration_s is None


def test_sounds_of_one_length_can_share_forwards() -> None:
    assert signature(resolved(lyrics="la")) == signature(resolved(seed=3, steps=4))
    assert signature(resolved()) != signature(resolved(duration_s=3))
    assert signature(resolved()).startswith("band:10sx1:")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"width": 512}, "width"),
        ({"height": 512}, "height"),
        ({"frames": 9}, "frames"),
        ({"fps": 9}, "fps"),
        ({"layers": 2}, "layers"),
        ({"image": AUDIO}, "image"),
        ({"mask": AUDIO}, "mask"),
        ({"last_image": AUDIO}, "last_image"),
        ({"strength": 0.5}, "strength"),
        ({"duration_s": 61}, "duration_s"),
        ({"duration_s": 0.5}, "duration_s"),
        ({"output_format": "png"}, "output_format"),
        ({"repaint_start_s": 1}, "audio"),
        ({"task": "audio_to_audio"}, "audio"),
        ({"task": "text_to_audio", "audio": AUDIO}, "audio"),
        ({"task": "audio_to_audio", "audio": AUDIO, "repaint_end_s": 1}, "repaint_end_s"),
        ({"task": "audio_inpaint", "audio": AUDIO}, "repaint_start_s"),
        ({"audio": AUDIO, "repaint_start_s": 2, "repaint_end_s": 1}, "repaint_end_s"),
        ({"audio": AUDIO, "repaint_start_s": 5, "duration_s": 5}, "repaint_start_s"),
    ],
)
def test_a_field_that_a_sound_does_not_have_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolved(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize("fields", [{"duration_s": 3}, {"audio": AUDIO}, {"output_format": "wav"}])
def test_an_image_refuses_the_fields_of_sounds(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolved(PAINTER, **fields)
    assert refused.value.param == next(iter(fields))


def with_audio(seconds: float, **fields: Any) -> Job:
    request = parse({"model": "band", "prompt": "a waltz", "audio": AUDIO, **fields})
    assert task_of(request, SPEC) in (Task.AUDIO_TO_AUDIO, Task.AUDIO_INPAINT)
    ref = InputRef(id=AUDIO, key="k", content_type="audio/wav", bytes=1, width=0, height=0, duration_s=seconds)
    return with_inputs(resolve_for_model(request, SPEC, "t", 0), request, SPEC, Inputs(audio=ref))


def test_a_sound_made_from_one_is_as_long() -> None:
    assert with_audio(7.5).duration_s == 7.5
    assert with_audio(7.5, duration_s=5).duration_s == 5
    assert with_audio(0.2).duration_s == 1.0
    assert with_audio(90, duration_s=5).duration_s == 5


def test_a_part_that_begins_after_the_sound_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="repaint_start_s: 50; the sound has 5 seconds") as refused:
        with_audio(5, repaint_start_s=50)
    assert refused.value.param == "repaint_start_s"


def test_a_part_that_ends_after_the_sound_ends_with_it() -> None:
    assert with_audio(5, repaint_start_s=2, repaint_end_s=50).repaint_end_s == 5
    assert with_audio(5, repaint_start_s=2).repaint_end_s is None
    continued = with_audio(5, repaint_start_s=5, repaint_end_s=50, duration_s=8)
    assert (continued.duration_s, continued.repaint_end_s) == (8, 8)


def test_a_sound_longer_than_the_model_makes_needs_a_length() -> None:
    with pytest.raises(
        InvalidRequest, match=r"90 seconds; model 'band' makes at most 60: send a duration_s"
    ) as refused:
        with_audio(90)
    assert refused.value.param == "audio"
