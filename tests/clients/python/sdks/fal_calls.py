"""fal's client for Python."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from typing import Any

import checks
from checks import HTTPS_URL, KEY, MODEL, PROMPT, URL, VIDEO_MODEL, call, check_image, check_video, png, refused, same

os.environ["FAL_QUEUE_RUN_HOST"] = HTTPS_URL.removeprefix("https://") + "/compat/fal"
import fal_client

BASE = f"{URL}/compat/fal"
APP = f"fusequeue/{MODEL}"
INPUT = {"prompt": PROMPT, "seed": 7}

client = fal_client.SyncClient(key=KEY)


def download(file: dict[str, Any]) -> bytes:
    with urllib.request.urlopen(file["url"], timeout=30) as response:
        return bytes(response.read())


@call("subscribe over https, by `FAL_QUEUE_RUN_HOST`")
def over_https() -> None:
    result = fal_client.SyncClient(key=KEY).subscribe(APP, INPUT)
    (image,) = result["images"]
    assert image["url"].startswith(HTTPS_URL), image["url"]
    check_image(download(image))
    fal_client.client.QUEUE_URL_FORMAT, fal_client.client.REST_URL = f"{BASE}/", BASE  # http: for the next calls


@call("subscribe with logs")
def subscribe() -> None:
    updates: list[Any] = []
    fields = {**INPUT, "num_inference_steps": 40, "num_images": 2}
    result = client.subscribe(APP, fields, with_logs=True, on_queue_update=updates.append)
    assert isinstance(updates[-1], fal_client.Completed)
    assert any("seed" in line["message"] for line in updates[-1].logs or ()), updates[-1]
    same((len(result["images"]), result["seed"]), (2, 7))
    for image in result["images"]:
        check_image(download(image))


@call("submit, iter_events, get; a video")
def submit_video() -> None:
    handle = client.submit(f"fusequeue/{VIDEO_MODEL}", {"prompt": "a wave"})
    assert isinstance(list(handle.iter_events(with_logs=True))[-1], fal_client.Completed)
    check_video(download(handle.get()["video"]))


@call("status, result, cancel")
def status_and_cancel() -> None:
    handle = client.submit(APP, INPUT)
    client.result(APP, handle.request_id)
    assert isinstance(client.status(APP, handle.request_id), fal_client.Completed)
    slow = client.submit(APP, {**INPUT, "num_inference_steps": 100, "num_images": 8}, priority="low")
    client.cancel(APP, slow.request_id)
    with refused(fal_client.FalClientHTTPError, "cancel"):
        client.result(APP, slow.request_id)


@call('upload with repository="fal", as an input')
def upload() -> None:
    url = client.upload(png(), "image/png", repository="fal")
    result = client.subscribe(APP, {**INPUT, "image_url": url, "strength": 0.7})
    check_image(download(result["images"][0]))


@call("AsyncClient.subscribe")
def asynchronous() -> None:
    result = asyncio.run(fal_client.AsyncClient(key=KEY).subscribe(APP, INPUT))
    check_image(download(result["images"][0]))


@call("errors: FalClientHTTPError")
def errors() -> None:
    with refused(fal_client.FalClientHTTPError, "num_inference_steps must be"):
        client.submit(APP, {**INPUT, "num_inference_steps": 1000})
    with refused(fal_client.FalClientHTTPError, "sdxl"):
        client.submit("fal-ai/sdxl", INPUT)
    with refused(fal_client.FalClientHTTPError, "key"):
        fal_client.SyncClient(key="fq_wrong").submit(APP, INPUT)


checks.main()
