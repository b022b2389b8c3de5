"""The unmodified clients of OpenAI, Hugging Face and Replicate with a real API and worker."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import replicate
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from openai import OpenAI
from PIL import Image, ImageChops
from replicate.helpers import FileOutput
from replicate.prediction import Prediction

from demo.checker import matches

PROMPT = "a red circle on a blue ground, left"


@pytest.fixture(scope="module")
def stack(make_shared_stack: Any) -> Any:
    return make_shared_stack().start()


@pytest.fixture
def client(stack: Any) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def hugging_face(stack: Any) -> InferenceClient:
    return InferenceClient(model=f"{stack.url}/compat/huggingface/demo", token="unused", timeout=60)


@pytest.fixture
def replicate_client(stack: Any) -> Iterator[replicate.Client]:
    with httpx.HTTPTransport() as transport:
        url = f"{stack.url}/compat/replicate"
        yield replicate.Client(api_token="unused", base_url=url, transport=transport)


def load_image(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def decoded(entry: Any) -> bytes:
    assert entry.b64_json is not None
    return base64.b64decode(entry.b64_json)


def solid_png(colour: str = "blue", size: tuple[int, int] = (64, 64), mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, "PNG")
    return file.getvalue()


def test_an_image_as_base64(client: OpenAI, stack: Any) -> None:
    response = client.images.generate(model="demo", prompt=PROMPT, size="64x64", quality="low")
    assert response.data is not None
    assert len(response.data) == 1
    assert (response.size, response.quality, response.output_format, response.background) == (
        "64x64",
        "low",
        "png",
        "opaque",
    )
    assert load_image(decoded(response.data[0])).size == (64, 64)
    job = stack.job(str(response.id))
    assert (job["status"], job["priority"]) == ("succeeded", "interactive")
    assert response.usage is not None
    assert response.created > 1_700_000_000
    assert response._request_id


def test_four_images_have_consecutive_seeds(client: OpenAI) -> None:
    response = client.images.generate(
        model="demo", prompt=PROMPT, n=4, extra_body={"seed": 7, "num_inference_steps": 6}
    )
    assert response.data is not None
    assert [entry.seed for entry in response.data] == [7, 8, 9, 10]
    assert len({decoded(entry) for entry in response.data}) == 4


def test_the_same_seed_gives_the_same_image(client: OpenAI) -> None:
    """Equal bytes with `reproducible`, whatever the batch mates; otherwise within 2 of 255."""

    def generate(seed: int, **fields: Any) -> bytes:
        response = client.images.generate(
            model="demo", prompt=PROMPT, extra_body={"seed": seed, "steps": 3, "guidance_scale": 3.0, **fields}
        )
        assert response.data is not None
        return decoded(response.data[0])

    assert generate(5, reproducible=True) == generate(5, reproducible=True) != generate(6, reproducible=True)
    extremes = ImageChops.difference(load_image(generate(5)), load_image(generate(5))).getextrema()
    assert max(high for _, high in extremes) <= 2


def test_an_edit_of_one_image(client: OpenAI, stack: Any) -> None:
    response = client.images.edit(
        model="demo", image=("start.png", solid_png()), prompt=PROMPT, extra_body={"strength": 0.5, "seed": 3}
    )
    assert response.data is not None
    assert load_image(decoded(response.data[0])).size == (64, 64)
    job = stack.job(str(response.id))
    assert (job["task"], job["strength"], job["seed"], len(job["images"])) == ("image_to_image", 0.5, 3, 1)


def test_an_edit_repaints_the_transparent_part_of_the_mask(client: OpenAI, stack: Any) -> None:
    mask = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 32, 64))
    file = io.BytesIO()
    mask.save(file, "PNG")
    response = client.images.edit(
        model="demo", image=("start.png", solid_png("white")), mask=("mask.png", file.getvalue()), prompt=PROMPT
    )
    assert response.data is not None
    assert stack.job(str(response.id))["task"] == "inpaint"
    image = load_image(decoded(response.data[0]))
    changed = ImageChops.difference(image, Image.new("RGB", image.size, "white"))
    kept, repainted = changed.crop((40, 0, 64, 64)), changed.crop((0, 0, 24, 64))
    assert _mean(repainted) > 2 * _mean(kept)


def _mean(image: Image.Image) -> float:
    values = image.convert("L").tobytes()
    return sum(values) / len(values)


def test_a_stream_has_one_event_per_image(client: OpenAI) -> None:
    stream = client.images.generate(model="demo", prompt=PROMPT, n=2, stream=True, extra_body={"seed": 1})
    events = list(stream)
    assert [event.type for event in events] == 2 * ["image_generation.completed"]
    assert [event.seed for event in events] == [1, 2]
    assert all(load_image(base64.b64decode(event.b64_json)).size == (64, 64) for event in events)


def test_a_stream_has_previews(client: OpenAI) -> None:
    """Each partial image is small and nearer to the final image than the previous one."""
    stream = client.images.generate(
        model="demo", prompt=PROMPT, stream=True, partial_images=3, extra_body={"seed": 4, "steps": 40}
    )
    *partial, completed = list(stream)
    assert [event.type for event in partial] == 3 * ["image_generation.partial_image"]
    assert [event.partial_image_index for event in partial] == [0, 1, 2]
    assert completed.type == "image_generation.completed"
    files = [base64.b64decode(event.b64_json) for event in partial]
    assert all(len(file) <= 64_000 for file in files)
    assert all(load_image(file).format == "PNG" for file in files)
    assert {event.output_format for event in partial} == {"png"}
    final = load_image(base64.b64decode(completed.b64_json))
    distances = [
        _mean(ImageChops.difference(load_image(file).convert("RGB").resize(final.size), final)) for file in files
    ]
    assert distances == sorted(distances, reverse=True)


def test_previews_do_not_change_the_image(client: OpenAI) -> None:
    def generate(partial_images: int) -> str:
        stream = client.images.generate(
            model="demo",
            prompt=PROMPT,
            stream=True,
            partial_images=partial_images,
            extra_body={"seed": 9, "reproducible": True, "steps": 4},
        )
        return list(stream)[-1].b64_json

    assert generate(0) == generate(3)


def test_a_stream_of_an_edit_has_edit_events(client: OpenAI) -> None:
    stream = client.images.edit(
        model="demo",
        image=("start.png", solid_png()),
        prompt=PROMPT,
        stream=True,
        partial_images=1,
        output_format="jpeg",
    )
    first, last = list(stream)
    assert (first.type, first.output_format) == ("image_edit.partial_image", "jpeg")
    assert load_image(base64.b64decode(first.b64_json)).format == "JPEG"
    assert last.type == "image_edit.completed"


def test_errors_are_typed_exceptions(client: OpenAI) -> None:
    """With code, field and request id."""
    with pytest.raises(openai.BadRequestError) as error:
        client.images.generate(model="demo", prompt=PROMPT, size="4096x64")
    assert (error.value.status_code, error.value.code, error.value.param) == (400, "invalid_request", "size")
    assert error.value.request_id
    assert error.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.images.generate(model="demo", prompt=PROMPT, extra_body={"stepz": 3})
    assert unknown.value.param == "stepz"
    with pytest.raises(openai.NotFoundError) as missing:
        client.images.generate(model="dall-e-3", prompt=PROMPT)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as broken:
        client.post("/images/generations", cast_to=object, content=b'{"prompt":')
    assert broken.value.code == "invalid_json"


def test_an_equal_request_after_the_response_is_a_new_job(client: OpenAI) -> None:
    """Also with the header of a retry."""

    def job_id(retry: str) -> str:
        headers = {"x-stainless-retry-count": retry}
        response = client.images.generate(
            model="demo", prompt="a green star", extra_headers=headers, extra_body={"steps": 2}
        )
        return str(response.id)

    assert len({job_id("0"), job_id("0"), job_id("1")}) == 3


def test_hugging_face_text_to_image(hugging_face: InferenceClient, stack: Any) -> None:
    """With Hugging Face's field names; the job is interactive."""
    fields = {"num_inference_steps": 16, "guidance_scale": 2.0, "seed": 7, "width": 128, "height": 64}
    image = hugging_face.text_to_image(PROMPT, negative_prompt="green", **fields)
    assert (image.size, image.format) == ((128, 64), "PNG")
    (job,) = [job for job in stack.client.get("/v1/jobs").json()["data"] if job["negative_prompt"] == "green"]
    names = ("status", "priority", "steps", "guidance_scale", "seed", "width", "height")
    assert [job[name] for name in names] == ["succeeded", "interactive", 16, 2.0, 7, 128, 64]
    assert matches(hugging_face.text_to_image(PROMPT, num_inference_steps=16, guidance_scale=2.0, seed=7), PROMPT)


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


def test_hugging_face_protocol_without_a_client(stack: Any) -> None:
    """A plain HTTP request; a header has the random seed."""
    response = httpx.post(f"{stack.url}/compat/huggingface/demo", json={"inputs": PROMPT}, timeout=60)
    assert response.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(response.content)).size == (64, 64)
    assert str(stack.job(response.headers["x-job-id"])["seed"]) == response.headers["x-seed"]


def test_replicate_run(replicate_client: replicate.Client) -> None:
    fields = {"prompt": PROMPT, "num_inference_steps": 16, "guidance_scale": 2.0, "seed": 7, "num_outputs": 2}
    outputs = replicate_client.run("fusequeue/demo", input=fields)
    assert all(isinstance(output, FileOutput) for output in outputs)
    assert [matches(Image.open(io.BytesIO(output.read())), PROMPT) for output in outputs] == [True, True]


def test_replicate_prediction_from_an_open_file_has_progress(replicate_client: replicate.Client, stack: Any) -> None:
    fields = {
        "prompt": PROMPT,
        "image": io.BytesIO(solid_png("white")),
        "prompt_strength": 0.5,
        "num_inference_steps": 20,
    }
    prediction = replicate_client.predictions.create(
        version="demo", input={**fields, "output_format": "jpg", "aspect_ratio": "1:1"}
    )
    prediction.wait()
    assert prediction.status == "succeeded", prediction.error
    assert prediction.progress is not None
    assert (prediction.progress.percentage, prediction.progress.current) == (1.0, prediction.progress.total)
    assert stack.job(prediction.id)["task"] == "image_to_image"
    assert Image.open(io.BytesIO(FileOutput(prediction.output[0], replicate_client).read())).format == "JPEG"


def test_replicate_stream_has_progress_and_the_image(replicate_client: replicate.Client) -> None:
    fields = {"prompt": PROMPT, "num_inference_steps": 40}
    *before, output, done = replicate_client.stream("fusequeue/demo", input=fields)
    assert [event.event.value for event in (*before, output, done)] == [*("logs" for _ in before), "output", "done"]
    steps = [progress.current for event in before if (progress := Prediction.Progress.parse(event.data)) is not None]
    assert steps == sorted(set(steps))
    assert Image.open(io.BytesIO(output.data.read())).size == (64, 64)  # type: ignore[attr-defined]
