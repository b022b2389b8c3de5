"""The unmodified `openai` SDK with real processes that serve tiny pipelines of diffusers' classes."""

from __future__ import annotations

import base64
import io
import json
import signal
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import av
import openai
import pytest
from harness.engine import DIFFUSERS_AND_NUMPY
from harness.webhook_receiver import WebhookReceiver, receiving
from openai import OpenAI
from openai.types.webhooks import BatchCompletedWebhookEvent, BatchFailedWebhookEvent
from PIL import Image, ImageChops
from standardwebhooks import Webhook, WebhookVerificationError
from tiny import registry

# The SDK warns about the end of OpenAI's service.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
]

PROMPT = "a red circle"
MODELS = """
[[model]]
id = "film"
source = "wan-2.2-ti2v"
tasks = ["text_to_video", "image_to_video"]
max_batch = 4
[model.defaults]
width = 64
height = 64
steps = 2
frames = 5
fps = 8
[model.limits]
multiple_of = 32
max_frames = 17
frames_multiple = 4
max_images = 4

[[model]]
id = "editor"
source = "flux-2-klein"
tasks = ["text_to_image", "edit"]
[model.defaults]
width = 64
height = 64
steps = 2
guidance_scale = 1.0
[model.limits]
multiple_of = 16
max_input_images = 4
[model.references]
pixels = 4096
multiple_of = 16

[[model]]
id = "broken"
source = "broken"
"""
JOB_EVENTS = ("job.succeeded", "job.failed", "job.canceled", "job.expired")
VIDEO_EVENTS = ("video.completed", "video.failed")
BATCH_EVENTS = ("batch.completed", "batch.failed")


@pytest.fixture(scope="module")
def receiver() -> Iterator[WebhookReceiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def stack(make_shared_stack: Any, tmp_path_factory: pytest.TempPathFactory, receiver: WebhookReceiver) -> Any:
    """An API, a worker with tiny models and a broken one, and chores that can reach the receiver."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("wan-2.2-ti2v", "flux-2-klein"):
        registry.save_tiny(name, folder / name)
    (folder / "broken").mkdir()
    (folder / "broken" / "model_index.json").write_text("{}")
    (folder / "models.toml").write_text(MODELS)
    webhooks = {"webhook_allow_networks": "127.0.0.0/8", "webhook_allow_http": "1", "webhook_ports": str(receiver.port)}
    return make_shared_stack(models=str(folder / "models.toml"), **webhooks).start()


@pytest.fixture
def client(stack: Any) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def test_a_video_is_created_polled_and_downloaded(client: OpenAI, stack: Any) -> None:
    """The MP4 has the requested length, and its index precedes the data."""
    video = client.videos.create_and_poll(model="film", prompt="a wave", seconds="2", extra_body={"seed": 5})
    assert (video.status, video.progress, video.size) == ("completed", 100, "64x64")
    data = client.videos.download_content(video.id).content
    with av.open(io.BytesIO(data)) as file:
        (stream,) = file.streams.video
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]
        assert (stream.codec_context.name, stream.pix_fmt, stream.average_rate) == ("h264", "yuv420p", 8)
    assert {frame.shape for frame in frames} == {(64, 64, 3)}
    assert len(frames) == stack.job(video.id.replace("video", "job"))["frames"] == 17
    assert frames[0].std() > 1  # not blank
    assert data.index(b"moov") < data.index(b"mdat")


def solid_png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(file, "PNG")
    return file.getvalue()


def edit(client: OpenAI, model: str, **params: Any) -> tuple[str, Image.Image]:
    """Return the id and the image of an edit."""
    response: Any = client.images.edit(model=model, extra_body={"seed": 3}, **params)
    return response.id, Image.open(io.BytesIO(base64.b64decode(response.data[0].b64_json))).convert("RGB")


def difference(first: Image.Image, second: Image.Image) -> float:
    """Return the mean difference of two images."""
    values = ImageChops.difference(first, second).convert("L").tobytes()
    return sum(values) / len(values)


def test_one_image_and_several_are_edited(client: OpenAI, stack: Any) -> None:
    """Each input image changes the result."""
    red, blue, white = (("one.png", solid_png(colour)) for colour in ("red", "blue", "white"))
    images = []
    for image in (red, [red, blue], [red, white]):
        job_id, result = edit(client, "editor", image=image, prompt=PROMPT)
        job = stack.job(job_id)
        assert (job["task"], job["status"]) == ("edit", "succeeded")
        assert len(job["images"]) == (len(image) if isinstance(image, list) else 1)
        images.append(result)
    for first, second in combinations(images, 2):
        assert difference(first, second) > 1


def create_batch(client: OpenAI, content: bytes) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/images/generations", completion_window="24h", metadata={"test": "webhooks"}
    )


def line(number: int) -> bytes:
    body = {"model": "editor", "prompt": PROMPT, "seed": number, "steps": 2}
    request = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/images/generations", "body": body}
    return json.dumps(request).encode()


def test_webhooks_are_unwrapped_before_and_after_a_rotation(
    client: OpenAI, stack: Any, receiver: WebhookReceiver
) -> None:
    """Events of jobs, videos and batches, with OpenAI's SDK and the reference library."""
    stack.chores()
    body = {"url": receiver.url, "events": [*JOB_EVENTS, *VIDEO_EVENTS, *BATCH_EVENTS]}
    endpoint = stack.client.post("/v1/webhooks", json=body).json()
    client.webhook_secret = endpoint["secret"]

    succeeded = client.videos.create(model="film", prompt="x").id
    stack.submit(model="broken", prompt="x")
    stack.submit(model="editor", prompt="x", deadline_s=0.001)
    (worker,) = [part for part in stack.processes if part.name.startswith("worker")]
    worker.send(signal.SIGSTOP)  # the job does not end before the cancellation
    canceled = client.videos.create(model="film", prompt="x", extra_body={"num_frames": 17}).id
    stack.client.post(f"/v1/jobs/{canceled.replace('video', 'job')}/cancel")
    worker.send(signal.SIGCONT)
    events: dict[str, Any] = {}
    for headers, content in receiver.wait_for((*JOB_EVENTS, *VIDEO_EVENTS)):
        event: Any = client.webhooks.unwrap(content, headers)
        Webhook(endpoint["secret"]).verify(content, headers)
        events[event.type] = event
    assert {name: events[name].data.id for name in VIDEO_EVENTS} == {
        "video.completed": succeeded,
        "video.failed": canceled,
    }
    assert events["job.succeeded"].data.id == succeeded.replace("video", "job")
    assert events["job.failed"].data.error["code"] == "model_unavailable"

    new = stack.client.post(f"/v1/webhooks/{endpoint['id']}/rotate").json()["secret"]
    contents = {"batch.completed": b"\n".join(map(line, range(2))), "batch.failed": b"invalid"}
    batches = {event: create_batch(client, content) for event, content in contents.items()}
    for headers, content in receiver.wait_for(BATCH_EVENTS):
        for secret in (endpoint["secret"], new):
            event = client.webhooks.unwrap(content, headers, secret=secret)
            Webhook(secret).verify(content, headers)
            assert isinstance(event, (BatchCompletedWebhookEvent, BatchFailedWebhookEvent))
            assert event.data.id == batches[event.type].id
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(content + " ", headers, secret=new)
        with pytest.raises(WebhookVerificationError):
            Webhook("whsec_" + base64.b64encode(bytes(32)).decode()).verify(content, headers)
    done = client.batches.retrieve(batches["batch.completed"].id)
    lines = [json.loads(row) for row in client.files.content(done.output_file_id or "").text.splitlines()]
    assert sorted(row["custom_id"] for row in lines) == ["line-0", "line-1"]
    assert all(row["response"]["body"]["data"][0]["b64_json"] for row in lines)
