"""The unmodified clients of Hugging Face and Replicate with a real API and worker."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import replicate
from harness.waiting import wait_until
from huggingface_hub import InferenceClient
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
def hugging_face(stack: Any) -> InferenceClient:
    return InferenceClient(model=f"{stack.url}/compat/huggingface/demo", token="unused", timeout=60)


@pytest.fixture
def client(stack: Any) -> Iterator[replicate.Client]:
    with httpx.HTTPTransport() as transport:
        url = f"{stack.url}/compat/replicate"
        yield replicate.Client(api_token="unused", base_url=url, transport=transport)


def solid_png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(file, "PNG")
    return file.getvalue()


def test_hugging_face_text_to_image(hugging_face: InferenceClient, stack: Any) -> None:
    """With Hugging Face's field names; the job is interactive."""
    fields = {"num_inference_steps": 16, "guidance_scale": 2.0, "seed": 7, "width": 128, "height": 64}
    image = hugging_face.text_to_image(PROMPT, negative_prompt="green", **fields)
    assert (image.size, image.format) == ((128, 64), "PNG")
    (job,) = [job for job in stack.client.get("/v1/jobs").json()["data"] if job["negative_prompt"] == "green"]
    names = ("status", "priority", "steps", "guidance_scale", "seed", "width", "height")
    assert [job[name] for name in names] == ["succeeded", "interactive", 16, 2.0, 7, 128, 64]
    assert matches(hugging_face.text_to_image(PROMPT, num_inference_steps=16, guidance_scale=2.0, seed=7), PROMPT)


def test_hugging_face_selects_the_format_by_the_accept_header(stack: Any) -> None:
    client = InferenceClient(model=f"{stack.url}/compat/huggingface/demo", headers={"Accept": "image/webp"})
    assert client.text_to_image(PROMPT, num_inference_steps=2).format == "WEBP"
    assert client.text_to_image(PROMPT, num_inference_steps=2, extra_body={"output_format": "jpeg"}).format == "JPEG"


def test_hugging_face_image_to_image(hugging_face: InferenceClient) -> None:
    """With a small strength the result is near to the input."""
    start = solid_png("white")
    image = hugging_face.image_to_image(start, PROMPT, strength=0.1, seed=3)  # type: ignore[arg-type]
    changed = ImageChops.difference(image.convert("RGB"), Image.new("RGB", image.size, "white")).convert("L").tobytes()
    assert sum(changed) / len(changed) < 60


def test_hugging_face_errors_have_a_message(hugging_face: InferenceClient, stack: Any) -> None:
    with pytest.raises(HfHubHTTPError, match="width must be a multiple of 8, not 65") as error:
        hugging_face.text_to_image(PROMPT, width=65)
    assert error.value.response.status_code == 422
    assert error.value.server_message == "width must be a multiple of 8, not 65"
    assert error.value.request_id
    with pytest.raises(HfHubHTTPError, match="steps must be 1 to 100, not 1000"):
        hugging_face.text_to_image(PROMPT, num_inference_steps=1000)
    with pytest.raises(HfHubHTTPError, match="stepz: there is no such field"):
        hugging_face.text_to_image(PROMPT, extra_body={"stepz": 3})
    with pytest.raises(HfHubHTTPError, match="unknown model: 'sdxl'; available: demo") as missing:
        hugging_face.text_to_image(PROMPT, model=f"{stack.url}/compat/huggingface/sdxl")
    assert missing.value.response.status_code == 404


def test_a_job_is_canceled_after_the_hugging_face_client_times_out(stack: Any) -> None:
    """The client does not retry."""
    (worker,) = [part for part in stack.processes if part.name.startswith("worker")]
    client = InferenceClient(model=f"{stack.url}/compat/huggingface/demo", timeout=0.5)
    worker.send(signal.SIGSTOP)  # the job does not end before the timeout

    def timed_out() -> list[str]:
        with pytest.raises(InferenceTimeoutError):
            client.text_to_image("a green star", extra_body={"metadata": {"order": "left"}})
        return states(stack, order="left")  # empty if the API was slower than the timeout

    try:
        wait_until(timed_out, "a client has timed out")
        wait_until(lambda: set(states(stack, order="left")) == {"canceled"}, "the job is canceled")
    finally:
        worker.send(signal.SIGCONT)


def states(stack: Any, **metadata: str) -> list[str]:
    params = {f"metadata.{name}": value for name, value in metadata.items()}
    return [job["status"] for job in stack.read("/v1/jobs", **params)["data"]]


def test_hugging_face_protocol_without_a_client(stack: Any) -> None:
    """A plain HTTP request; a header has the random seed."""
    response = httpx.post(f"{stack.url}/compat/huggingface/demo", json={"inputs": PROMPT}, timeout=60)
    assert response.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(response.content)).size == (64, 64)
    assert str(stack.job(response.headers["x-job-id"])["seed"]) == response.headers["x-seed"]


def test_replicate_run(client: replicate.Client) -> None:
    fields = {"prompt": PROMPT, "num_inference_steps": 16, "guidance_scale": 2.0, "seed": 7, "num_outputs": 2}
    outputs = client.run("fusequeue/demo", input=fields)
    assert all(isinstance(output, FileOutput) for output in outputs)
    assert [matches(Image.open(io.BytesIO(output.read())), PROMPT) for output in outputs] == [True, True]


def test_replicate_prediction_from_an_open_file_has_progress(client: replicate.Client, stack: Any) -> None:
    fields = {
        "prompt": PROMPT,
        "image": io.BytesIO(solid_png("white")),
        "prompt_strength": 0.5,
        "num_inference_steps": 20,
    }
    prediction = client.predictions.create(
        version="demo", input={**fields, "output_format": "jpg", "aspect_ratio": "1:1"}
    )
    prediction.wait()
    assert prediction.status == "succeeded", prediction.error
    assert prediction.progress is not None
    assert (prediction.progress.percentage, prediction.progress.current) == (1.0, prediction.progress.total)
    assert stack.job(prediction.id)["task"] == "image_to_image"
    assert Image.open(io.BytesIO(FileOutput(prediction.output[0], client).read())).format == "JPEG"


def test_replicate_stream_has_progress_and_the_image(client: replicate.Client) -> None:
    *before, output, done = client.stream("fusequeue/demo", input={"prompt": PROMPT, "num_inference_steps": 40})
    assert [event.event.value for event in (*before, output, done)] == [*("logs" for _ in before), "output", "done"]
    steps = [progress.current for event in before if (progress := Prediction.Progress.parse(event.data)) is not None]
    assert steps == sorted(set(steps))
    assert Image.open(io.BytesIO(output.data.read())).size == (64, 64)  # type: ignore[attr-defined]
