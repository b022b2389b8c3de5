"""Sounds of the engine: lyrics and inputs without a field reach the call, and previews and step caching do no harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness.checkpoints import run_with_checkpoints
from harness.engine import EngineHarness, a_job, a_spec
from parity.plain import PlainPipeline

from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults, Limits
from shared.config.step_schedules import StepSchedule
from shared.tasks import Task

OLD_NORM = "ignore:.*weight_norm:FutureWarning"  # of diffusers' decoders of sounds
pytestmark = [pytest.mark.filterwarnings(OLD_NORM), pytest.mark.usefixtures("shared_models")]

SONG = {"task": Task.TEXT_TO_AUDIO, "prompt": "a dog", "steps": 3, "seed": 5}


def band(source: Path) -> ModelSpec:
    return a_spec(
        source,
        tasks=(Task.TEXT_TO_AUDIO, Task.AUDIO_TO_AUDIO),
        extra=("bpm", "keyscale"),
        limits=Limits(max_duration_s=2, max_images=8),
        defaults=Defaults(duration_s=2, steps=3),
    )


def test_lyrics_and_other_inputs_are_those_of_the_plain_call(tiny_model: Callable[[str], Path]) -> None:
    source = tiny_model("ace-step")
    jobs = [
        a_job("plain", **SONG),
        a_job("sung", **SONG, lyrics="la la la"),
        a_job("fast", **SONG, extra={"bpm": 120, "keyscale": "C major"}),
    ]
    recorder, plain = EngineHarness(band(source)).run(*jobs), PlainPipeline(source)
    assert [recorder.finished[job.id].error for job in jobs] == [None] * 3
    made = [recorder.sounds[job.id, 0].samples for job in jobs]
    for job in jobs:
        assert plain.sounds(job)[0].difference(recorder.sounds[job.id, 0]) < 1e-4
    assert min(np.abs(one - made[0]).max() for one in made[1:]) > 1e-3, "they change the sound"


def test_an_input_of_another_type_names_it(tiny_model: Callable[[str], Path]) -> None:
    recorder = EngineHarness(band(tiny_model("ace-step"))).run(a_job("job", **SONG, extra={"bpm": "fast"}))
    error = recorder.finished["job"].error
    assert error is not None
    assert error.param == "extra.bpm"


def test_reproducible_sounds_have_the_same_bits_with_other_mates(tiny_model: Callable[[str], Path]) -> None:
    source = tiny_model("ace-step")
    kept = a_job("kept", **SONG, reproducible=True)
    mate = a_job("mate", **SONG | {"prompt": "a boat", "seed": 6}, reproducible=True)
    alone, together = (EngineHarness(band(source)).run(*jobs) for jobs in ((kept,), (kept, mate)))
    assert together.finished["kept"].batching.max_jobs == 2
    assert np.array_equal(alone.sounds["kept", 0].samples, together.sounds["kept", 0].samples)


def test_a_sound_has_no_previews_and_can_skip_steps(tiny_model: Callable[[str], Path]) -> None:
    many = SONG | {"steps": 12}
    jobs = [a_job("all", **many, previews=3), a_job("some", **many, step_cache=StepSchedule(every=3))]
    recorder = EngineHarness(band(tiny_model("ace-step"))).run(*jobs)
    assert recorder.previews == []
    assert recorder.finished["some"].batching.skipped_steps > 0
    assert recorder.sounds["some", 0].samples.shape == recorder.sounds["all", 0].samples.shape


def test_a_strength_that_the_pipeline_does_not_take_is_a_warning(tiny_model: Callable[[str], Path]) -> None:
    fields = SONG | {"task": Task.AUDIO_TO_AUDIO, "strength": 0.3}
    ignored = EngineHarness(band(tiny_model("stable-audio"))).run(a_job("job", **fields))
    used = EngineHarness(band(tiny_model("ace-step"))).run(a_job("job", **fields))
    assert [one.param for one in ignored.finished["job"].warnings] == ["strength"]
    assert used.finished["job"].warnings == ()


def test_sounds_have_checkpoints_that_are_checked(tiny_model: Callable[[str], Path]) -> None:
    """ACE-Step's guidance has momentum, so that it has none."""
    job = a_job("one", **SONG | {"steps": 6})
    recorder = run_with_checkpoints(band(tiny_model("stable-audio")), job)
    assert {event.reason for event in recorder.checkpoints} == {None}
    assert any(image for event in recorder.checkpoints for image in event.images)
    recorder = run_with_checkpoints(band(tiny_model("ace-step")), job)
    assert "was off by" in (recorder.checkpoints[-1].reason or "")
