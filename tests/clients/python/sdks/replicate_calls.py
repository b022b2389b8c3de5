"""Replicate's client for Python."""

from __future__ import annotations

import asyncio
import io
import struct
import time
import zlib
from typing import Any

import checks
import replicate
from checks import HTTPS_URL, KEY, MODEL, PROMPT, URL, VIDEO_MODEL, call, check_image, check_video, png, refused, same
from replicate.exceptions import ModelError, ReplicateError
from replicate.helpers import FileOutput
from replicate.webhook import Webhooks

NAME = f"fusequeue/{MODEL}"
client = replicate.Client(api_token=KEY, base_url=f"{URL}/compat/replicate")


def read(output: Any) -> bytes:
    return output.read() if isinstance(output, FileOutput) else FileOutput(output, client).read()


@call("run: images, a video")
def run() -> None:
    outputs = client.run(NAME, input={"prompt": PROMPT, "num_inference_steps": 8, "num_outputs": 2, "seed": 7})
    same(len(outputs), 2)
    for output in outputs:
        check_image(read(output))
    check_video(read(client.run(f"fusequeue/{VIDEO_MODEL}", input={"prompt": "a wave"})))


@call("run over https: outputs are URLs")
def run_over_https() -> None:
    secure = replicate.Client(api_token=KEY, base_url=f"{HTTPS_URL}/compat/replicate")
    (output,) = secure.run(NAME, input={"prompt": PROMPT, "image": io.BytesIO(png())})
    assert output.url.startswith(HTTPS_URL), output.url
    check_image(output.read())


@call("run with an open file")
def run_with_file() -> None:
    params = {"prompt": PROMPT, "image": io.BytesIO(png()), "prompt_strength": 0.7, "output_format": "jpg"}
    (output,) = client.run(NAME, input=params)
    check_image(read(output), format="JPEG")


@call("run with the defaults of SDXL")
def run_with_defaults() -> None:
    defaults = {"refine": "no_refiner", "lora_scale": 0.6, "prompt_strength": 0.8, "apply_watermark": True}
    (output,) = client.run(NAME, input={"prompt": PROMPT, "scheduler": "DDIM", **defaults})
    check_image(read(output))


@call("predictions.create, wait, reload, get, list")
def prediction() -> None:
    made = client.predictions.create(version=MODEL, input={"prompt": PROMPT, "num_inference_steps": 20})
    made.wait()
    same((made.status, made.error), ("succeeded", None))
    assert made.progress is not None
    same(made.progress.percentage, 1.0)
    check_image(read(made.output[0]))
    found = client.predictions.get(made.id)
    found.reload()
    same((found.id, found.status), (made.id, "succeeded"))
    assert made.id in [entry.id for entry in client.predictions.list()]


@call("predictions.cancel")
def cancel() -> None:
    slow = {"prompt": PROMPT, "num_inference_steps": 100, "num_outputs": 8}
    made = client.models.predictions.create(NAME, input=slow)
    made.cancel()
    deadline = time.monotonic() + 30
    while made.status not in ("canceled", "succeeded", "failed") and time.monotonic() < deadline:
        made.reload()
    same(made.status, "canceled")


@call("stream")
def stream() -> None:
    *_, output, done = client.stream(NAME, input={"prompt": PROMPT, "num_inference_steps": 40})
    same((output.event.value, done.event.value), ("output", "done"))
    check_image(read(output.data))


@call("async_run")
def asynchronous() -> None:
    (output,) = asyncio.run(client.async_run(NAME, input={"prompt": PROMPT}))
    check_image(read(output))


@call("files.create, get; a file as input")
def files() -> None:
    file = client.files.create(io.BytesIO(png("blue")), filename="a.png")
    same(client.files.get(file.id).content_type, "image/png")
    (output,) = client.run(NAME, input={"prompt": PROMPT, "image": file.urls["get"]})
    check_image(read(output))


@call("models.list, get; webhooks.default.secret")
def models() -> None:
    assert {MODEL, VIDEO_MODEL} <= {model.name for model in client.models.list()}
    same(client.models.get(NAME).name, MODEL)
    assert client.webhooks.default.secret().key.startswith("whsec_")
    assert Webhooks.validate is not None


@call("errors: ReplicateError, ModelError")
def errors() -> None:
    with refused(ReplicateError, "stepz"):
        client.run(NAME, input={"prompt": PROMPT, "stepz": 3})
    with refused(ReplicateError, "sdxl"):
        client.run("fusequeue/sdxl", input={"prompt": PROMPT})
    with refused(ModelError, "image"):
        client.run(NAME, input={"prompt": PROMPT, "image": io.BytesIO(undecodable())})


def undecodable() -> bytes:
    """Return a PNG of valid structure, with pixels that cannot be decompressed."""
    header, pixels = struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0), bytes(64)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    parts = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


checks.main()
