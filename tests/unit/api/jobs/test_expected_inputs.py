"""What an artifact of a job that has not ended will be, as an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from api.jobs.expected_inputs import check_is_made, check_pixels, expected_input
from shared.artifact_ref import ArtifactRef
from shared.config.candidates import BestOf
from shared.config.destinations import Destination
from shared.errors import InputRejected
from shared.job import Job
from shared.tasks import OutputFormat, Task

Make = Callable[..., Job]
SIDES = {"width": 72, "height": 40}
FILM = {"task": Task.TEXT_TO_VIDEO, "output_format": OutputFormat.MP4, "frames": 17, "fps": 24}
SOUND = {"task": Task.TEXT_TO_AUDIO, "output_format": OutputFormat.FLAC, "width": 0, "height": 0, "duration_s": 7.5}


@pytest.mark.parametrize(
    ("job", "content_type", "expected"),
    [
        ({}, "image/png", {"width": 72, "height": 40, "frames": 0, "fps": None, "duration_s": None}),
        ({"output_format": OutputFormat.JPEG, "task": Task.UPSCALE}, "image/jpeg", {"width": 72, "height": 40}),
        ({"output_format": OutputFormat.LATENT}, "application/safetensors", {"width": 9, "height": 5}),
        (FILM, "video/mp4", {"width": 72, "height": 40, "frames": 17, "fps": 24.0, "duration_s": None}),
        (FILM | {"width": 73, "height": 41}, "video/mp4", {"width": 72, "height": 40}),  # the encoder needs even sides
        (SOUND, "audio/flac", {"width": 0, "height": 0, "frames": 0, "duration_s": 7.5}),
    ],
)
def test_an_input_follows_from_the_job_that_makes_it(
    make_job: Make, job: dict[str, Any], content_type: str, expected: dict[str, Any]
) -> None:
    source = make_job(**{**SIDES, **job})
    ref = ArtifactRef(job=source.id)
    made = expected_input(ref, source, latent_scale=8)
    assert (made.source, made.content_type, made.id, made.key, made.bytes) == (ref, content_type, "", "", 0)
    assert {name: getattr(made, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("job", "most"),
    [
        ({}, 0),
        ({"n": 3}, 2),
        ({"n": 2, "layers": 4}, 7),
        ({"n": 2, "best_of": BestOf(candidates=8, keep=2)}, 1),
    ],
)
def test_a_job_has_as_many_artifacts_as_it_keeps(make_job: Make, job: dict[str, Any], most: int) -> None:
    source = make_job(**job)
    check_is_made(ArtifactRef(job=source.id, artifact=most), source, "image")
    with pytest.raises(InputRejected, match=f"artifact is at most {most}, not {most + 1}"):
        check_is_made(ArtifactRef(job=source.id, artifact=most + 1), source, "image")


def test_results_that_are_sent_elsewhere_are_no_inputs(make_job: Make) -> None:
    source = make_job(output=Destination(bucket="renders"))
    with pytest.raises(InputRejected, match="are not stored here") as refused:
        check_is_made(ArtifactRef(job=source.id), source, "mask")
    assert refused.value.param == "mask"


def test_an_artifact_that_will_have_too_many_pixels_is_refused(make_job: Make) -> None:
    source = make_job(width=128, height=64)
    expected = expected_input(ArtifactRef(job=source.id), source, latent_scale=8)
    check_pixels(expected, 128 * 64, "image")
    with pytest.raises(InputRejected, match="image: it will have 128x64 pixels; at most 8191 are allowed"):
        check_pixels(expected, 128 * 64 - 1, "image")
