"""Hugging Face's client for Python."""

from __future__ import annotations

import asyncio

import checks
from checks import KEY, MODEL, PROMPT, URL, VIDEO_MODEL, call, check_image, png, refused
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

BASE = f"{URL}/compat/huggingface"
client = InferenceClient(model=f"{BASE}/{MODEL}", token=KEY, timeout=checks.TIMEOUT_S)


@call("InferenceClient.text_to_image")
def text_to_image() -> None:
    fields = {"num_inference_steps": 8, "guidance_scale": 2.0, "seed": 7, "width": 128, "height": 64}
    check_image(client.text_to_image(PROMPT, negative_prompt="green", **fields), (128, 64))
    webp = client.text_to_image(PROMPT, extra_body={"output_format": "webp", "scheduler": "DDIMScheduler"})
    check_image(webp, format="WEBP")


@call("InferenceClient.image_to_image")
def image_to_image() -> None:
    check_image(client.image_to_image(png(), PROMPT, strength=0.7, seed=3))


@call("AsyncInferenceClient.text_to_image")
def asynchronous() -> None:
    async def generate() -> None:
        async with AsyncInferenceClient(model=f"{BASE}/{MODEL}", token=KEY) as client:
            check_image(await client.text_to_image(PROMPT))

    asyncio.run(generate())


@call("errors: HfHubHTTPError, also for a model of videos")
def errors() -> None:
    with refused(HfHubHTTPError, "width must be a multiple of 8, not 65"):
        client.text_to_image(PROMPT, width=65)
    with refused(HfHubHTTPError, VIDEO_MODEL, "video"):
        client.text_to_image("a wave", model=f"{BASE}/{VIDEO_MODEL}")
    with refused(HfHubHTTPError, "sdxl"):
        client.text_to_image(PROMPT, model=f"{BASE}/sdxl")
    with refused(HfHubHTTPError, "401"):
        InferenceClient(model=f"{BASE}/{MODEL}", token="fq_wrong").text_to_image(PROMPT)


checks.main()
