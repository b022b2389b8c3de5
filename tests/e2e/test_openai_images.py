"""The `openai` SDK as it is, against a real API with a real worker: pictures, edits, streams, errors, retries."""

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


def picture(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def decoded(entry: Any) -> bytes:
    assert entry.b64_json is not None
    return base64.b64decode(entry.b64_json)


def drawn(colour: str = "blue", size: tuple[int, int] = (64, 64), mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, "PNG")
    return file.getvalue()


def jobs(stack: Any, **metadata: str) -> list[dict[str, Any]]:
    asked = {f"metadata.{name}": value for name, value in metadata.items()}
    found: list[dict[str, Any]] = stack.read("/v1/jobs", **asked)["data"]
    return found


def test_a_picture_as_base64(client: OpenAI, stack: Any) -> None:
    answer = client.images.generate(model="demo", prompt=PROMPT, size="64x64", quality="low")
    assert answer.data is not None
    assert len(answer.data) == 1
    assert (answer.size, answer.quality, answer.output_format, answer.background) == ("64x64", "low", "png", "opaque")
    assert picture(decoded(answer.data[0])).size == (64, 64)
    job = stack.job(str(answer.id))
    assert (job["status"], job["priority"]) == ("succeeded", "interactive")
    assert answer.usage is not None
    assert answer.created > 1_700_000_000
    assert answer._request_id


def test_a_picture_by_url(client: OpenAI) -> None:
    """The URL is fetched as a browser would: without the SDK and its key."""
    answer = client.images.generate(
        model="demo", prompt=PROMPT, response_format="url", output_format="webp", output_compression=80
    )
    assert answer.data is not None
    assert answer.data[0].url is not None
    found = httpx.get(answer.data[0].url, timeout=60)
    assert found.headers["content-type"] == "image/webp"
    assert picture(found.content).format == "WEBP"


def test_four_pictures_with_seeds_that_follow_each_other(client: OpenAI) -> None:
    answer = client.images.generate(model="demo", prompt=PROMPT, n=4, extra_body={"seed": 7, "num_inference_steps": 6})
    assert answer.data is not None
    assert [entry.seed for entry in answer.data] == [7, 8, 9, 10]
    assert len({decoded(entry) for entry in answer.data}) == 4


def test_the_same_seed_gives_the_same_picture(client: OpenAI) -> None:
    """Bytes where that was asked for, whatever the company; else within 2 of 255."""

    def made(seed: int, **more: Any) -> bytes:
        answer = client.images.generate(
            model="demo", prompt=PROMPT, extra_body={"seed": seed, "steps": 3, "guidance_scale": 3.0, **more}
        )
        assert answer.data is not None
        return decoded(answer.data[0])

    assert made(5, reproducible=True) == made(5, reproducible=True) != made(6, reproducible=True)
    extremes = ImageChops.difference(picture(made(5)), picture(made(5))).getextrema()
    assert max(high for _, high in extremes) <= 2


def test_the_fields_of_diffusion_reach_the_job(client: OpenAI, stack: Any) -> None:
    answer = client.images.generate(
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
    job = stack.job(str(answer.id))
    told = ("steps", "guidance_scale", "negative_prompt", "scheduler", "metadata")
    assert [job[name] for name in told] == [3, 1.5, "green", "EulerDiscreteScheduler", {"order": "12"}]


def test_an_edit_of_one_picture(client: OpenAI, stack: Any) -> None:
    answer = client.images.edit(
        model="demo", image=("start.png", drawn()), prompt=PROMPT, extra_body={"strength": 0.5, "seed": 3}
    )
    assert answer.data is not None
    assert picture(decoded(answer.data[0])).size == (64, 64)
    job = stack.job(str(answer.id))
    assert (job["task"], job["strength"], job["seed"], len(job["images"])) == ("image_to_image", 0.5, 3, 1)


def test_an_edit_with_a_mask_repaints_what_is_transparent(client: OpenAI, stack: Any) -> None:
    mask = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 32, 64))
    file = io.BytesIO()
    mask.save(file, "PNG")
    answer = client.images.edit(
        model="demo", image=("start.png", drawn("white")), mask=("mask.png", file.getvalue()), prompt=PROMPT
    )
    assert answer.data is not None
    assert stack.job(str(answer.id))["task"] == "inpaint"
    image = picture(decoded(answer.data[0]))
    changed = ImageChops.difference(image, Image.new("RGB", image.size, "white"))
    kept, repainted = changed.crop((40, 0, 64, 64)), changed.crop((0, 0, 24, 64))
    assert _mean(repainted) > 2 * _mean(kept)


def _mean(image: Image.Image) -> float:
    values = image.convert("L").tobytes()
    return sum(values) / len(values)


def test_several_pictures_are_refused_by_a_model_that_takes_one(client: OpenAI) -> None:
    """`image[]` arrives as several pictures: the error is the model's, and names the field."""
    with pytest.raises(openai.UnprocessableEntityError) as told:
        client.images.edit(model="demo", image=[("a.png", drawn()), ("b.png", drawn("red"))], prompt=PROMPT)
    assert told.value.param == "images"


def test_a_stream_gives_each_picture_as_it_ends(client: OpenAI) -> None:
    stream = client.images.generate(model="demo", prompt=PROMPT, n=2, stream=True, extra_body={"seed": 1})
    events = list(stream)
    assert [event.type for event in events] == 2 * ["image_generation.completed"]
    assert [event.seed for event in events] == [1, 2]
    assert all(picture(base64.b64decode(event.b64_json)).size == (64, 64) for event in events)


def test_a_stream_shows_the_picture_as_it_comes(client: OpenAI) -> None:
    """Partial images in order, then the picture: each is small, and nearer to the picture than the one before."""
    stream = client.images.generate(
        model="demo", prompt=PROMPT, stream=True, partial_images=3, extra_body={"seed": 4, "steps": 40}
    )
    *partial, completed = list(stream)
    assert [event.type for event in partial] == 3 * ["image_generation.partial_image"]
    assert [event.partial_image_index for event in partial] == [0, 1, 2]
    assert completed.type == "image_generation.completed"
    files = [base64.b64decode(event.b64_json) for event in partial]
    assert all(len(file) <= 64_000 for file in files)
    assert all(picture(file).format == "WEBP" for file in files)
    final = picture(base64.b64decode(completed.b64_json))
    distances = [_mean(ImageChops.difference(picture(file).convert("RGB").resize(final.size), final)) for file in files]
    assert distances == sorted(distances, reverse=True)


def test_previews_change_no_bit_of_the_picture(client: OpenAI) -> None:
    def made(partial_images: int) -> str:
        stream = client.images.generate(
            model="demo",
            prompt=PROMPT,
            stream=True,
            partial_images=partial_images,
            extra_body={"seed": 9, "reproducible": True, "steps": 4},
        )
        return list(stream)[-1].b64_json

    assert made(0) == made(3)


def test_a_stream_of_an_edit_has_its_own_names(client: OpenAI) -> None:
    stream = client.images.edit(
        model="demo", image=("start.png", drawn()), prompt=PROMPT, stream=True, partial_images=1, output_format="jpeg"
    )
    first, last = list(stream)
    assert (first.type, first.output_format) == ("image_edit.partial_image", "jpeg")
    assert last.type == "image_edit.completed"


def test_errors_come_as_typed_exceptions(client: OpenAI) -> None:
    """Each with its code, the field at fault, and the id of the request."""
    with pytest.raises(openai.UnprocessableEntityError) as told:
        client.images.generate(model="demo", prompt=PROMPT, size="4096x64")
    assert (told.value.status_code, told.value.code, told.value.param) == (422, "invalid_request", "size")
    assert told.value.request_id
    assert told.value.type == "invalid_request_error"
    with pytest.raises(openai.UnprocessableEntityError) as unknown:
        client.images.generate(model="demo", prompt=PROMPT, extra_body={"stepz": 3})
    assert unknown.value.param == "stepz"
    with pytest.raises(openai.NotFoundError) as missing:
        client.images.generate(model="dall-e-3", prompt=PROMPT)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as broken:
        client.post("/images/generations", cast_to=object, content=b'{"prompt":')
    assert broken.value.code == "invalid_json"


def test_keys_and_limits_come_as_typed_exceptions(stack: Any, make_stack: Any) -> None:
    """401 without a good key, 429 above the tenant's requests a minute: at a second API on the same queue."""
    more = api_of(stack, make_stack, namespace="keyed", auth="keys", max_requests_per_minute_per_tenant="2")
    with OpenAI(base_url=f"{more.url}/v1", api_key="sk-other", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as told:
            client.images.generate(model="demo", prompt=PROMPT)
        assert (told.value.code, told.value.param) == ("invalid_api_key", "Authorization")
    with OpenAI(base_url=f"{more.url}/v1", api_key=key_of(more), max_retries=0) as client:
        listed = [client.models.list() for _ in range(2)]
        assert listed[0].data[0].id == "demo"
        with pytest.raises(openai.RateLimitError) as limited:
            client.models.list()
        assert limited.value.code == "rate_limit_exceeded"
        assert limited.value.request_id


def api_of(stack: Any, make_stack: Any, **settings: str) -> Any:
    """Start another API on the stack's Redis, with settings of its own."""
    made = make_stack(redis_url=stack.env["FUSEQUEUE_REDIS_URL"], **settings)
    made.api.start()
    wait_until(made.ready, "the API is ready")
    return made


def key_of(stack: Any) -> str:
    """Return a new API key, made as an operator does."""
    command = [sys.executable, "-m", "cli.main", "keys", "create", "--tenant", "acme", "--json"]
    told = subprocess.run(command, env=stack.env, capture_output=True, text=True, timeout=90)
    assert told.returncode == 0, told.stderr
    return str(json.loads(told.stdout)["key"])


class Hasty(httpx.BaseTransport):
    """Breaks the connection of the first try of a request while its job is under way; it goes on with the second."""

    def __init__(self, stack: Any) -> None:
        self._inner = httpx.HTTPTransport()
        self._stack = stack
        (self._worker,) = [part for part in stack.processes if part.name.startswith("worker")]
        self.retries: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.retries.append(request.headers["x-stainless-retry-count"])
        if len(self.retries) == 1:
            self._worker.send(signal.SIGSTOP)  # so that the job is not done before
            send_and_disconnect(request, lambda: jobs(self._stack, order="retried"))
        self._worker.send(signal.SIGCONT)
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._worker.send(signal.SIGCONT)
        self._inner.close()


def test_a_retry_finds_the_job_of_its_first_try(stack: Any) -> None:
    """The SDK sends no Idempotency-Key: its retry waits for the job that is under way, and makes no second one."""
    transport = Hasty(stack)
    http = httpx.Client(transport=transport)
    with OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=1, http_client=http) as client:
        body = {"steps": 2, "metadata": {"order": "retried"}}
        answer = client.images.generate(model="demo", prompt=PROMPT, extra_body=body)
    assert transport.retries == ["0", "1"]
    found = jobs(stack, order="retried")
    assert [(job["id"], job["status"]) for job in found] == [(answer.id, "succeeded")]


def test_the_same_request_again_is_a_new_job(client: OpenAI) -> None:
    """Its answer has been delivered: whoever asks again, be it as a retry, wants another picture."""

    def asked(retry: str) -> str:
        headers = {"x-stainless-retry-count": retry}
        answer = client.images.generate(
            model="demo", prompt="a green star", extra_headers=headers, extra_body={"steps": 2}
        )
        return str(answer.id)

    assert len({asked("0"), asked("0"), asked("1")}) == 3


def test_a_job_whose_client_hung_up_is_canceled(stack: Any, make_stack: Any) -> None:
    """After the time that a retry has. No worker looks at this line, so that the job is not done before."""
    line = api_of(stack, make_stack, namespace="nobody", disconnect_grace_s="0.2")
    body = {"model": "demo", "prompt": PROMPT, "metadata": {"order": "left"}}
    with pytest.raises(httpx.ReadTimeout):
        send_and_disconnect(
            httpx.Request("POST", f"{line.url}/v1/images/generations", json=body), lambda: jobs(line, order="left")
        )
    wait_until(lambda: [job["status"] for job in jobs(line, order="left")] == ["canceled"], "it is canceled")
