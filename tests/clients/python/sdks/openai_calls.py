"""The OpenAI SDK for Python: images, edits, videos, files, batches, models."""

from __future__ import annotations

import asyncio
import base64
import json
import time
import urllib.request
from typing import Any

import checks
import openai
from checks import KEY, MODEL, PROMPT, URL, VIDEO_MODEL, call, check_image, check_video, png, refused, same

ENDPOINT = "/v1/images/generations"
client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=checks.TIMEOUT_S)


def decoded(entry: Any) -> bytes:
    return base64.b64decode(entry.b64_json)


@call("models.list, models.retrieve")
def models() -> None:
    assert {model.id for model in client.models.list()} == {MODEL, VIDEO_MODEL}
    same(client.models.retrieve(MODEL).object, "model")


@call("images.generate: base64, `n`, `extra_body`")
def image_as_base64() -> None:
    response = client.images.generate(
        model=MODEL, prompt=PROMPT, n=2, size="64x64", quality="low", extra_body={"seed": 7, "steps": 4}
    )
    same([entry.seed for entry in response.data], [7, 8])
    first, second = (check_image(decoded(entry)) for entry in response.data)
    assert first.tobytes() != second.tobytes()
    assert response.usage is not None


@call("images.generate: url, webp")
def image_as_url() -> None:
    response = client.images.generate(model=MODEL, prompt=PROMPT, response_format="url", output_format="webp")
    with urllib.request.urlopen(response.data[0].url, timeout=30) as download:  # without the key
        check_image(download.read(), format="WEBP")


@call("images.generate: stream with partial images")
def stream() -> None:
    events = list(
        client.images.generate(
            model=MODEL, prompt=PROMPT, stream=True, partial_images=2, output_format="jpeg", extra_body={"steps": 40}
        )
    )
    same([event.type.rpartition(".")[2] for event in events], ["partial_image", "partial_image", "completed"])
    same([event.partial_image_index for event in events[:-1]], [0, 1])
    check_image(decoded(events[-1]), format="JPEG")
    for event in events[:-1]:
        check_image(decoded(event), size_of(event), "JPEG")


def size_of(event: Any) -> tuple[int, int]:
    width, height = (int(side) for side in event.size.split("x"))
    return width, height


@call("images.edit: one image, a mask")
def edit() -> None:
    response = client.images.edit(model=MODEL, prompt=PROMPT, image=("a.png", png()), extra_body={"strength": 0.7})
    check_image(decoded(response.data[0]))
    mask = ("mask.png", png("white"))
    check_image(decoded(client.images.edit(model=MODEL, prompt=PROMPT, image=("a.png", png()), mask=mask).data[0]))


@call("images.edit: stream")
def edit_stream() -> None:
    *_, completed = client.images.edit(model=MODEL, prompt=PROMPT, image=("a.png", png()), stream=True)
    same(completed.type, "image_edit.completed")
    check_image(decoded(completed))


@call("AsyncOpenAI images.generate")
def asynchronous() -> None:
    async def generate() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=checks.TIMEOUT_S) as client:
            calls = (client.images.generate(model=MODEL, prompt=PROMPT) for _ in range(3))
            return await asyncio.gather(*calls)

    for response in asyncio.run(generate()):
        check_image(decoded(response.data[0]))


@call("videos.create_and_poll, retrieve, download_content, list, delete")
def video() -> None:
    video = client.videos.create_and_poll(model=VIDEO_MODEL, prompt="a wave", seconds="1", extra_body={"seed": 5})
    same((video.status, video.progress, video.size), ("completed", 100, "64x64"))
    same(client.videos.retrieve(video.id).status, "completed")
    check_video(client.videos.download_content(video.id).content)
    thumbnail = client.videos.download_content(video.id, variant="thumbnail").content
    assert thumbnail[:4] in (b"RIFF", b"\x89PNG", b"\xff\xd8\xff\xe0"), thumbnail[:4]
    assert video.id in [entry.id for entry in client.videos.list(limit=1)]
    assert client.videos.delete(video.id).deleted
    with refused(openai.NotFoundError):
        client.videos.retrieve(video.id)


@call("videos.create with `input_reference`, polled")
def video_from_image() -> None:
    video = client.videos.create(
        model=VIDEO_MODEL, prompt="a wave", input_reference=("a.png", png("blue"), "image/png")
    )
    while video.status in ("queued", "in_progress"):
        time.sleep(0.2)
        video = client.videos.retrieve(video.id)
    same(video.status, "completed")
    check_video(client.videos.download_content(video.id).read())


@call("files.create, list, retrieve, content, delete")
def files() -> None:
    content = b'{"custom_id": "1"}\n'
    kept = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("in.jsonl", content), purpose="batch", expires_after=kept)
    same((file.purpose, file.bytes, file.expires_at - file.created_at), ("batch", len(content), 3600))
    assert file.id in [entry.id for entry in client.files.list(purpose="batch")]
    same(client.files.retrieve(file.id).filename, "in.jsonl")
    same(client.files.content(file.id).read(), content)
    assert client.files.delete(file.id).deleted
    with refused(openai.NotFoundError):
        client.files.content(file.id)


def batch_line(number: int) -> str:
    body = {"model": MODEL, "prompt": PROMPT, "seed": number, "steps": 4 if number else 1000}
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body})


@call("batches.create, retrieve, list, cancel; results and errors of lines")
def batches() -> None:
    file = client.files.create(file=("in.jsonl", "\n".join(map(batch_line, range(3))).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.5)
        batch = client.batches.retrieve(batch.id)
    same((batch.status, batch.request_counts.completed, batch.request_counts.failed), ("completed", 2, 1))
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    same(sorted(line["custom_id"] for line in lines), ["line-1", "line-2"])
    for line in lines:
        check_image(base64.b64decode(line["response"]["body"]["data"][0]["b64_json"]))
    (failed,) = client.files.content(batch.error_file_id).text.splitlines()
    assert "steps must be 1 to" in failed, failed
    assert batch.id in [entry.id for entry in client.batches.list(limit=1)]
    second = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    assert client.batches.cancel(second.id).status in ("cancelling", "cancelled")


@call("errors: BadRequestError with `param`, NotFoundError, AuthenticationError")
def errors() -> None:
    with refused(openai.BadRequestError, "stepz"):
        client.images.generate(model=MODEL, prompt=PROMPT, extra_body={"stepz": 3})
    with refused(openai.BadRequestError, "size"):
        client.images.generate(model=MODEL, prompt=PROMPT, size="4096x64")
    with refused(openai.BadRequestError, "background"):
        client.images.generate(model=MODEL, prompt=PROMPT, background="transparent")
    with refused(openai.NotFoundError, "sdxl"):
        client.images.generate(model="sdxl", prompt=PROMPT)
    with refused(openai.AuthenticationError):
        client.with_options(api_key="fq_wrong").models.list()


checks.main()
