"""The `openai` SDK as it is against real processes that serve pipelines of diffusers' own classes, if tiny ones."""

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

# The SDK warns of OpenAI's own service; the protocol lives on.
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
id = "painter"
source = "sd"
tasks = ["text_to_image", "inpaint"]
[model.defaults]
width = 64
height = 64
steps = 4

[[model]]
id = "broken"
source = "broken"
"""
ENDS = ("job.succeeded", "job.failed", "job.canceled", "job.expired")
ENDS_OF_VIDEOS = ("video.completed", "video.failed")
ENDS_OF_BATCHES = ("batch.completed", "batch.failed")


@pytest.fixture(scope="module")
def receiver() -> Iterator[WebhookReceiver]:
    with receiving() as made:
        yield made


@pytest.fixture(scope="module")
def stack(make_shared_stack: Any, tmp_path_factory: pytest.TempPathFactory, receiver: WebhookReceiver) -> Any:
    """An API, a worker of tiny models and one that cannot be loaded, and chores that may call the receiver."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("wan-2.2-ti2v", "flux-2-klein", "sd"):
        registry.save_tiny(name, folder / name)
    (folder / "broken").mkdir()
    (folder / "broken" / "model_index.json").write_text("{}")
    (folder / "models.toml").write_text(MODELS)
    own = {"webhook_allow_networks": "127.0.0.0/8", "webhook_allow_http": "1", "webhook_ports": str(receiver.port)}
    return make_shared_stack(models=str(folder / "models.toml"), **own).start()


@pytest.fixture
def client(stack: Any) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def test_a_video_is_created_polled_and_played(client: OpenAI, stack: Any) -> None:
    """By the SDK's own loop, from a worker to an MP4 of the asked length that a player can begin at once."""
    video = client.videos.create_and_poll(model="film", prompt="a wave", seconds="2", extra_body={"seed": 5})
    assert (video.status, video.progress, video.size) == ("completed", 100, "64x64")
    data = client.videos.download_content(video.id).content
    with av.open(io.BytesIO(data)) as file:
        (stream,) = file.streams.video
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]
        assert (stream.codec_context.name, stream.pix_fmt, stream.average_rate) == ("h264", "yuv420p", 8)
    assert {frame.shape for frame in frames} == {(64, 64, 3)}
    assert len(frames) == stack.job(video.id.replace("video", "job"))["frames"] == 17
    assert frames[0].std() > 1  # something is to be seen
    assert data.index(b"moov") < data.index(b"mdat")


def test_videos_are_listed_over_three_pages_and_deleted(client: OpenAI, stack: Any) -> None:
    """Whether done or not; what is deleted is in no page, and neither it nor its file can be had."""
    made = [client.videos.create(model="film", prompt=f"wave {number}").id for number in range(3)]
    stack.finish(made[0].replace("video", "job"))
    pages = list(client.videos.list(limit=1).iter_pages())
    assert [[video.id for video in page.data] for page in pages[:3]] == [[one] for one in reversed(made)]
    for one in made:
        assert client.videos.delete(one).deleted
        for gone in (client.videos.retrieve, client.videos.download_content):
            with pytest.raises(openai.NotFoundError):
                gone(one)
    assert not {video.id for video in client.videos.list(limit=1)} & set(made)


def drawn(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(file, "PNG")
    return file.getvalue()


def edited(client: OpenAI, model: str, **asked: Any) -> tuple[str, Image.Image]:
    """Return the id of the job that edits, and its picture."""
    answer: Any = client.images.edit(model=model, extra_body={"seed": 3}, **asked)
    return answer.id, Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))).convert("RGB")


def difference(one: Image.Image, other: Image.Image, box: tuple[int, int, int, int] = (0, 0, 64, 64)) -> float:
    """Return the mean difference in a part of two pictures."""
    values = ImageChops.difference(one, other).crop(box).convert("L").tobytes()
    return sum(values) / len(values)


def test_one_picture_and_several_are_edited(client: OpenAI, stack: Any) -> None:
    """Each of several counts: with another one among them, the picture is another."""
    red, blue, white = (("one.png", drawn(colour)) for colour in ("red", "blue", "white"))
    pictures = []
    for image in (red, [red, blue], [red, white]):
        job_id, picture = edited(client, "editor", image=image, prompt=PROMPT)
        job = stack.job(job_id)
        assert (job["task"], job["status"]) == ("edit", "succeeded")
        assert len(job["images"]) == (len(image) if isinstance(image, list) else 1)
        pictures.append(picture)
    for one, other in combinations(pictures, 2):
        assert difference(one, other) > 1


def test_what_a_mask_leaves_open_is_repainted(client: OpenAI, stack: Any) -> None:
    """Two prompts make two pictures of one where the mask is transparent, and change next to nothing elsewhere."""
    mask = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 32, 64))
    file = io.BytesIO()
    mask.save(file, "PNG")
    asked = {"image": ("a.png", drawn("white")), "mask": ("mask.png", file.getvalue())}
    (job_id, cat), (_, house) = (edited(client, "painter", prompt=prompt, **asked) for prompt in ("a cat", "houses"))
    assert stack.job(job_id)["task"] == "inpaint"
    assert difference(cat, house, (0, 0, 24, 64)) > 3 * difference(cat, house, (48, 0, 64, 64))


def batch_of(client: OpenAI, content: bytes) -> openai.types.Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/images/generations", completion_window="24h", metadata={"of": "hooks"}
    )


def line(number: int) -> bytes:
    body = {"model": "painter", "prompt": PROMPT, "seed": number, "steps": 2}
    asked = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/images/generations", "body": body}
    return json.dumps(asked).encode()


def test_webhooks_are_unwrapped_before_and_after_a_rotation(
    client: OpenAI, stack: Any, receiver: WebhookReceiver
) -> None:
    """Real events of jobs, videos and batches, by OpenAI's library and Standard Webhooks' own."""
    stack.chores()
    body = {"url": receiver.url, "events": [*ENDS, *ENDS_OF_VIDEOS, *ENDS_OF_BATCHES]}
    made = stack.client.post("/v1/webhooks", json=body).json()
    client.webhook_secret = made["secret"]

    succeeded = client.videos.create(model="film", prompt="x").id
    stack.submit(model="broken", prompt="x")
    stack.submit(model="painter", prompt="x", deadline_s=0.001)
    (worker,) = [part for part in stack.processes if part.name.startswith("worker")]
    worker.send(signal.SIGSTOP)  # so that what is to be canceled is not done before
    canceled = client.videos.create(model="film", prompt="x", extra_body={"num_frames": 17}).id
    stack.client.post(f"/v1/jobs/{canceled.replace('video', 'job')}/cancel")
    worker.send(signal.SIGCONT)
    told: dict[str, Any] = {}
    for head, content in receiver.wait_for((*ENDS, *ENDS_OF_VIDEOS)):
        event: Any = client.webhooks.unwrap(content, head)
        Webhook(made["secret"]).verify(content, head)
        told[event.type] = event
    assert {name: told[name].data.id for name in ENDS_OF_VIDEOS} == {
        "video.completed": succeeded,
        "video.failed": canceled,
    }
    assert told["job.succeeded"].data.id == succeeded.replace("video", "job")
    assert told["job.failed"].data.error["code"] == "model_unavailable"

    new = stack.client.post(f"/v1/webhooks/{made['id']}/rotate").json()["secret"]
    contents = {"batch.completed": b"\n".join(map(line, range(2))), "batch.failed": b"no json"}
    batches = {event: batch_of(client, content) for event, content in contents.items()}
    for head, content in receiver.wait_for(ENDS_OF_BATCHES):
        for secret in (made["secret"], new):
            event = client.webhooks.unwrap(content, head, secret=secret)
            Webhook(secret).verify(content, head)
            assert isinstance(event, (BatchCompletedWebhookEvent, BatchFailedWebhookEvent))
            assert event.data.id == batches[event.type].id
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(content + " ", head, secret=new)
        with pytest.raises(WebhookVerificationError):
            Webhook("whsec_" + base64.b64encode(bytes(32)).decode()).verify(content, head)
    done = client.batches.retrieve(batches["batch.completed"].id)
    lines = [json.loads(one) for one in client.files.content(done.output_file_id or "").text.splitlines()]
    assert sorted(one["custom_id"] for one in lines) == ["line-0", "line-1"]
    assert all(one["response"]["body"]["data"][0]["url"] for one in lines)
