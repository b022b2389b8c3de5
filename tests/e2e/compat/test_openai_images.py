"""The unmodified `openai` SDK with a real API and worker: images, edits, streams, errors, retries."""

from __future__ import annotations

import base64
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from harness.disconnecting_client import send_and_disconnect
from harness.waiting import wait_until
from openai import OpenAI
from PIL import Image, ImageChops

PROMPT = "a red circle on a blue ground, left"


@pytest.fixture(scope="module")
def stack(make_shared_stack: Any) -> Any:
    return make_shared_stack().start()


@pytest.fixture
def client(stack: Any) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


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


def jobs(stack: Any, **metadata: str) -> list[dict[str, Any]]:
    params = {f"metadata.{name}": value for name, value in metadata.items()}
    matching: list[dict[str, Any]] = stack.read("/v1/jobs", **params)["data"]
    return matching


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


def test_an_image_as_url(client: OpenAI) -> None:
    """The URL needs no key."""
    response = client.images.generate(
        model="demo", prompt=PROMPT, response_format="url", output_format="webp", output_compression=80
    )
    assert response.data is not None
    assert response.data[0].url is not None
    download = httpx.get(response.data[0].url, timeout=60)
    assert download.headers["content-type"] == "image/webp"
    assert load_image(download.content).format == "WEBP"


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


def test_job_fields_reach_the_job(client: OpenAI, stack: Any) -> None:
    response = client.images.generate(
        model="demo",
        prompt=PROMPT,
        user="someone",
        extra_body={
            "steps": 3,
            "guidance_scale": 1.5,
            "negative_prompt": "green",
            "scheduler": "EulerDiscreteScheduler",
            "metadata": {"order": "12"},
        },
    )
    job = stack.job(str(response.id))
    names = ("steps", "guidance_scale", "negative_prompt", "scheduler", "metadata")
    assert [job[name] for name in names] == [3, 1.5, "green", "EulerDiscreteScheduler", {"order": "12"}]


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


def test_several_images_are_refused_by_a_model_for_one(client: OpenAI) -> None:
    """`image[]` is parsed as several images; the error names the field."""
    with pytest.raises(openai.BadRequestError) as error:
        client.images.edit(model="demo", image=[("a.png", solid_png()), ("b.png", solid_png("red"))], prompt=PROMPT)
    assert error.value.param == "images"


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


def test_key_and_rate_limit_errors_are_typed_exceptions(stack: Any, make_stack: Any) -> None:
    """401 without a valid key, 429 above the tenant's requests per minute; with a second API on the same Redis."""
    keyed = second_api(stack, make_stack, namespace="keyed", auth="keys", max_requests_per_minute_per_tenant="2")
    with OpenAI(base_url=f"{keyed.url}/v1", api_key="sk-other", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as error:
            client.images.generate(model="demo", prompt=PROMPT)
        assert (error.value.code, error.value.param) == ("invalid_api_key", "Authorization")
    with OpenAI(base_url=f"{keyed.url}/v1", api_key=create_key(keyed), max_retries=0) as client:
        listed = [client.models.list() for _ in range(2)]
        assert listed[0].data[0].id == "demo"
        with pytest.raises(openai.RateLimitError) as limited:
            client.models.list()
        assert limited.value.code == "rate_limit_exceeded"
        assert limited.value.request_id


def second_api(stack: Any, make_stack: Any, **settings: str) -> Any:
    """Start another API on the stack's Redis with other settings."""
    second = make_stack(redis_url=stack.env["FUSEQUEUE_REDIS_URL"], **settings)
    second.api.start()
    wait_until(second.ready, "the API is ready")
    return second


def create_key(stack: Any) -> str:
    """Create an API key with the CLI."""
    command = [sys.executable, "-m", "cli.main", "keys", "create", "--tenant", "acme", "--json"]
    result = subprocess.run(command, env=stack.env, capture_output=True, text=True, timeout=90)
    assert result.returncode == 0, result.stderr
    return str(json.loads(result.stdout)["key"])


class DisconnectingTransport(httpx.BaseTransport):
    """Disconnects the first attempt of a request before its job ends; forwards the second one."""

    def __init__(self, stack: Any) -> None:
        self._inner = httpx.HTTPTransport()
        self._stack = stack
        (self._worker,) = [part for part in stack.processes if part.name.startswith("worker")]
        self.retries: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.retries.append(request.headers["x-stainless-retry-count"])
        if len(self.retries) == 1:
            self._worker.send(signal.SIGSTOP)  # the job does not end before the disconnect
            send_and_disconnect(request, lambda: jobs(self._stack, order="retried"))
        self._worker.send(signal.SIGCONT)
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._worker.send(signal.SIGCONT)
        self._inner.close()


def test_a_retry_waits_for_the_job_of_its_first_attempt(stack: Any) -> None:
    """Without an Idempotency-Key; no second job is created."""
    transport = DisconnectingTransport(stack)
    http = httpx.Client(transport=transport)
    with OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=1, http_client=http) as client:
        body = {"steps": 2, "metadata": {"order": "retried"}}
        response = client.images.generate(model="demo", prompt=PROMPT, extra_body=body)
    assert transport.retries == ["0", "1"]
    retried = jobs(stack, order="retried")
    assert [(job["id"], job["status"]) for job in retried] == [(response.id, "succeeded")]


def test_an_equal_request_after_the_response_is_a_new_job(client: OpenAI) -> None:
    """Also with the header of a retry."""

    def job_id(retry: str) -> str:
        headers = {"x-stainless-retry-count": retry}
        response = client.images.generate(
            model="demo", prompt="a green star", extra_headers=headers, extra_body={"steps": 2}
        )
        return str(response.id)

    assert len({job_id("0"), job_id("0"), job_id("1")}) == 3


def test_a_job_is_canceled_after_its_client_disconnects(stack: Any, make_stack: Any) -> None:
    """After the grace period for a retry. Without a worker, so that the job does not end."""
    service = second_api(stack, make_stack, namespace="idle", disconnect_grace_s="0.2")
    body = {"model": "demo", "prompt": PROMPT, "metadata": {"order": "left"}}
    with pytest.raises(httpx.ReadTimeout):
        send_and_disconnect(
            httpx.Request("POST", f"{service.url}/v1/images/generations", json=body),
            lambda: jobs(service, order="left"),
        )
    wait_until(lambda: [job["status"] for job in jobs(service, order="left")] == ["canceled"], "the job is canceled")
