"""OpenAI requests for images and videos as job requests."""

from __future__ import annotations

from typing import Any

import pytest
from harness.http_server import ROOT

from api.jobs.request import JobRequest
from api.protocols.openai.image_requests import ImageRequest, parse_image_request
from api.protocols.openai.video_requests import parse_video_request
from shared.config import models_file
from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.errors import InvalidRequest
from shared.job_fields import Priority
from shared.tasks import Task

CATALOG = models_file.load(ROOT / "models.toml")
TASKS = (Task.TEXT_TO_VIDEO, Task.IMAGE_TO_VIDEO)
FILMS = Catalog((ModelSpec(id="film", source="x", tasks=TASKS, limits=Limits(max_frames=81, frames_multiple=4)),))
IN_A, IN_B = "in_" + 32 * "a", "in_" + 32 * "b"


def read(**body: Any) -> ImageRequest:
    return parse_image_request({"prompt": "a red circle", **body}, CATALOG, "image_generation")


def test_openai_fields_become_job_fields() -> None:
    parsed = read(size="128x64", n=3, output_format="jpeg", output_compression=0, num_inference_steps=5, model=None)
    request = parsed.request
    assert (request.width, request.height, request.n, request.steps) == (128, 64, 3, 5)
    assert (request.output_format, request.output_quality, request.model) == ("jpeg", 1, "demo")
    assert request.priority is Priority.INTERACTIVE


@pytest.mark.parametrize(
    ("body", "image", "images"),
    [
        ({"image": {"image_url": "https://a.example/x.png"}}, "https://a.example/x.png", None),
        ({"images": [{"file_id": IN_A}]}, IN_A, None),
        ({"image": [IN_A]}, IN_A, None),
    ],
)
def test_image_references_become_input_images(body: dict[str, Any], image: str | None, images: Any) -> None:
    request = read(**body).request
    assert (request.image, request.images) == (image, images)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"size": "large"}, "size"),
        ({"size": "60x60"}, "size"),
        ({"size": "64x64", "width": 64}, "size"),
        ({"width": 60}, "width"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"partial_images": 4}, "partial_images"),
        ({"response_format": "png"}, "response_format"),
        ({"output_format": "mp4"}, "output_format"),
        ({"output_compression": 101}, "output_compression"),
        ({"background": "transparent"}, "background"),
        ({"background": "white"}, "background"),
        ({"stream": "yes"}, "stream"),
        ({"steps": 0}, "steps"),
        ({"colour": "red"}, "colour"),
        ({"loras": [{"id": "ink"}]}, "adapters.0.id"),
        ({"prompt": ""}, "prompt"),
        ({"image": {"image_url": None}}, "image"),
        ({"image": {"file_id": None}}, "image"),
    ],
)
def test_an_error_names_the_field_of_the_request(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read(**body)
    assert error.value.param == param


def test_a_body_that_is_not_an_object_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        parse_image_request(["x"], CATALOG, "image_generation")


def read_video(**body: Any) -> JobRequest:
    return parse_video_request({"prompt": "a wave", **body}, FILMS).request


def test_a_request_without_a_model_gets_the_first_that_does_its_task() -> None:
    film = FILMS.get("film")
    tasks = {"larger": Task.UPSCALE_VIDEO, "text": Task.TEXT_TO_VIDEO, "image": Task.IMAGE_TO_VIDEO}
    catalog = Catalog(tuple(film.model_copy(update={"id": name, "tasks": (task,)}) for name, task in tasks.items()))
    for body, model in (({}, "text"), ({"image": IN_A}, "image"), ({"video": IN_A}, "larger")):
        assert parse_video_request({"prompt": "a wave", **body}, catalog).request.model == model


def test_the_seconds_of_a_changed_video_are_those_of_the_result() -> None:
    """Its own rate is not known yet, so it gets that of the model, unless one is sent."""
    spec = FILMS.get("film")
    changer = Catalog((spec.model_copy(update={"tasks": (Task.VIDEO_TO_VIDEO,)}),))
    body = {"prompt": "a wave", "video": IN_A, "seconds": 2}
    request = parse_video_request(body, changer).request
    assert (request.frames, request.fps) == (round((2 * spec.defaults.fps - 1) / 4) * 4 + 1, spec.defaults.fps)
    sent = parse_video_request(body | {"fps": 8}, changer).request
    assert (sent.frames, sent.fps) == (17, 8)


def test_seconds_are_at_least_those_that_the_model_makes() -> None:
    """At 24 frames a second; a little less is rounded up."""
    limits = Limits(min_frames=120, max_frames=341, frames_multiple=17)
    films = Catalog((FILMS.get("film").model_copy(update={"limits": limits}),))
    assert parse_video_request({"prompt": "a wave", "seconds": 4.5}, films).request.frames == 120
    with pytest.raises(InvalidRequest, match=r"makes at least 5\.00 at 24 fps") as error:
        parse_video_request({"prompt": "a wave", "seconds": 1}, films)
    assert error.value.param == "seconds"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        # No value is dropped silently.
        ({"image": IN_A, "input_reference": IN_B}, "input_reference"),
        ({"image": IN_A, "reference_url": IN_B}, "input_reference"),
        ({"input_reference": {"image_url": None}}, "image"),
        ({"frames": 33, "num_frames": 81}, "num_frames"),
        ({"seconds": 1, "frames": 33}, "seconds"),
        ({"seconds": 1, "num_frames": 33}, "seconds"),
        ({"nonsense": 1}, "nonsense"),
        ({"n": 2}, "n"),
        ({"seconds": "60"}, "seconds"),
        ({"seconds": "often"}, "seconds"),
        ({"size": "63x64"}, "size"),
        ({"size": "large"}, "size"),
        ({"frames": 20}, "frames"),
        ({"num_frames": 161}, "frames"),
        # Numbers of any size
        ({"num_frames": 10**400}, "num_frames"),
        ({"seconds": 1, "fps": 10**400}, "fps"),
        ({"frames": 10**400}, "frames"),
        ({"width": 10**4000, "height": 10**4000}, "width"),
    ],
)
def test_an_error_names_the_field_of_a_video_request(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        read_video(**body)
    assert error.value.param == param
