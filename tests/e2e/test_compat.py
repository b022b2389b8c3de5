"""The clients of Hugging Face and of Replicate as they are, against a real API with a real worker."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import replicate
from harness.waiting import wait_until
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError, InferenceTimeoutError
from PIL import Image, ImageChops
from replicate.helpers import FileOutput
from replicate.prediction import Prediction

from demo.checker import matches

PROMPT = "a red circle on a blue ground, left"


@pytest.fixture(scope="module")
def stack(make_shared_stack: Any) -> Any:
    return make_shared_stack(disconnect_grace_s="0").start()


@pytest.fixture
def face(stack: Any) -> InferenceClient:
    return InferenceClient(model=f"{stack.url}/compat/huggingface/demo", token="unused", timeout=60)


@pytest.fixture
def client(stack: Any) -> Iterator[replicate.Client]:
    with httpx.HTTPTransport() as transport:
        url = f"{stack.url}/compat/replicate"
        yield replicate.Client(api_token="unused", base_url=url, transport=transport)


def drawn(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(file, "PNG")
    return file.getvalue()


def test_hugging_face_gets_the_picture_of_its_prompt(face: InferenceClient, stack: Any) -> None:
    """By its names for steps and the rest; the job is one like any other, and urgent."""
    asked = {"num_inference_steps": 16, "guidance_scale": 2.0, "seed": 7, "width": 128, "height": 64}
    picture = face.text_to_image(PROMPT, negative_prompt="green", **asked)
    assert (picture.size, picture.format) == ((128, 64), "PNG")
    (job,) = [one for one in stack.client.get("/v1/jobs").json()["data"] if one["negative_prompt"] == "green"]
    told = ("status", "priority", "steps", "guidance_scale", "seed", "width", "height")
    assert [job[name] for name in told] == ["succeeded", "interactive", 16, 2.0, 7, 128, 64]
    assert matches(face.text_to_image(PROMPT, num_inference_steps=16, guidance_scale=2.0, seed=7), PROMPT)


def test_hugging_face_gets_the_kind_that_it_accepts(stack: Any) -> None:
    face = InferenceClient(model=f"{stack.url}/compat/huggingface/demo", headers={"Accept": "image/webp"})
    assert face.text_to_image(PROMPT, num_inference_steps=2).format == "WEBP"
    assert face.text_to_image(PROMPT, num_inference_steps=2, extra_body={"output_format": "jpeg"}).format == "JPEG"


def test_hugging_face_makes_a_picture_from_a_picture(face: InferenceClient) -> None:
    """One that was left alone by a small strength is near to what it began as."""
    start = drawn("white")
    made = face.image_to_image(start, PROMPT, strength=0.1, seed=3)  # type: ignore[arg-type]
    changed = ImageChops.difference(made.convert("RGB"), Image.new("RGB", made.size, "white")).convert("L").tobytes()
    assert sum(changed) / len(changed) < 60


async def test_hugging_faces_async_client(stack: Any) -> None:
    async with AsyncInferenceClient(model=f"{stack.url}/compat/huggingface/demo", token="unused") as face:
        picture = await face.text_to_image(PROMPT, num_inference_steps=16, guidance_scale=2.0, seed=7)
        assert matches(picture, PROMPT)
        with pytest.raises(HfHubHTTPError, match="steps must be 1 to 100, not 1000"):
            await face.text_to_image(PROMPT, num_inference_steps=1000)


def test_hugging_face_shows_errors_in_words(face: InferenceClient, stack: Any) -> None:
    with pytest.raises(HfHubHTTPError, match="width must be a multiple of 8, not 65") as told:
        face.text_to_image(PROMPT, width=65)
    assert told.value.response.status_code == 422
    assert told.value.server_message == "width must be a multiple of 8, not 65"
    assert told.value.request_id
    with pytest.raises(HfHubHTTPError, match="stepz: there is no such field"):
        face.text_to_image(PROMPT, extra_body={"stepz": 3})
    with pytest.raises(HfHubHTTPError, match="unknown model: 'sdxl'; available: demo") as missing:
        face.text_to_image(PROMPT, model=f"{stack.url}/compat/huggingface/sdxl")
    assert missing.value.response.status_code == 404


def test_what_hugging_face_does_not_wait_for_is_canceled(stack: Any) -> None:
    """Its client sends a request once: what it gave up on nobody will fetch."""
    (worker,) = [part for part in stack.processes if part.name.startswith("worker")]
    face = InferenceClient(model=f"{stack.url}/compat/huggingface/demo", timeout=0.5)
    worker.send(signal.SIGSTOP)  # so that the job is not done before

    def given_up() -> list[str]:
        with pytest.raises(InferenceTimeoutError):
            face.text_to_image("a green star", extra_body={"metadata": {"order": "left"}})
        return states(stack, order="left")  # none yet where the API was held up for longer than the client waits

    try:
        wait_until(given_up, "a job is given up on")
        wait_until(lambda: set(states(stack, order="left")) == {"canceled"}, "it is canceled")
    finally:
        worker.send(signal.SIGCONT)


def states(stack: Any, **metadata: str) -> list[str]:
    asked = {f"metadata.{name}": value for name, value in metadata.items()}
    return [job["status"] for job in stack.read("/v1/jobs", **asked)["data"]]


def test_without_a_library(stack: Any) -> None:
    """As curl would ask; the seed that was drawn is told."""
    answer = httpx.post(f"{stack.url}/compat/huggingface/demo", json={"inputs": PROMPT}, timeout=60)
    assert answer.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(answer.content)).size == (64, 64)
    assert str(stack.job(answer.headers["x-job-id"])["seed"]) == answer.headers["x-seed"]


def test_replicate_gets_the_picture_of_its_prompt(client: replicate.Client) -> None:
    told = {"prompt": PROMPT, "num_inference_steps": 16, "guidance_scale": 2.0, "seed": 7, "num_outputs": 2}
    outputs = client.run("fusequeue/demo", input=told)
    assert all(isinstance(one, FileOutput) for one in outputs)
    assert [matches(Image.open(io.BytesIO(one.read())), PROMPT) for one in outputs] == [True, True]


def test_replicate_starts_from_an_open_file_and_tells_progress(client: replicate.Client, stack: Any) -> None:
    told = {"prompt": PROMPT, "image": io.BytesIO(drawn("white")), "prompt_strength": 0.5, "num_inference_steps": 20}
    prediction = client.predictions.create(
        version="demo", input={**told, "output_format": "jpg", "aspect_ratio": "1:1"}
    )
    prediction.wait()
    assert prediction.status == "succeeded", prediction.error
    assert prediction.progress is not None
    assert (prediction.progress.percentage, prediction.progress.current) == (1.0, prediction.progress.total)
    assert stack.job(prediction.id)["task"] == "image_to_image"
    assert Image.open(io.BytesIO(FileOutput(prediction.output[0], client).read())).format == "JPEG"


def test_replicate_streams_progress_and_the_picture(client: replicate.Client) -> None:
    *before, output, done = client.stream("fusequeue/demo", input={"prompt": PROMPT, "num_inference_steps": 40})
    assert [event.event.value for event in (*before, output, done)] == [*("logs" for _ in before), "output", "done"]
    seen = [found.current for event in before if (found := Prediction.Progress.parse(event.data)) is not None]
    assert seen == sorted(set(seen))
    assert Image.open(io.BytesIO(output.data.read())).size == (64, 64)  # type: ignore[attr-defined]
