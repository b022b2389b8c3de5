"""LiteLLM: images and edits as those of an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import checks
import litellm
from checks import KEY, MODEL, PROMPT, URL, call, check_image, png, refused, same

SERVER = {"model": f"openai/{MODEL}", "prompt": PROMPT, "api_base": f"{URL}/v1", "api_key": KEY}


def decoded(response: Any) -> bytes:
    return base64.b64decode(response.data[0].b64_json)


@call("image_generation: base64, `n`, `extra_body`")
def generate() -> None:
    response = litellm.image_generation(**SERVER, n=2, size="64x64", extra_body={"steps": 4, "seed": 7})
    same(len(response.data), 2)
    check_image(decoded(response))


@call("image_generation: url")
def generate_url() -> None:
    response = litellm.image_generation(**SERVER, extra_body={"response_format": "url"})
    assert response.data[0].url.startswith(f"{URL}/v1/jobs/"), response.data[0].url


@call("aimage_generation")
def generate_async() -> None:
    check_image(decoded(asyncio.run(litellm.aimage_generation(**SERVER))))


@call("image_edit, aimage_edit")
def edit() -> None:
    file = io.BytesIO(png())
    file.name = "a.png"
    check_image(decoded(litellm.image_edit(**SERVER, image=file)))
    file.seek(0)
    check_image(decoded(asyncio.run(litellm.aimage_edit(**SERVER, image=[file]))))


@call("errors: BadRequestError, AuthenticationError")
def errors() -> None:
    with refused(litellm.BadRequestError, "stepz"):
        litellm.image_generation(**SERVER, extra_body={"stepz": 3})
    with refused(litellm.AuthenticationError):
        litellm.image_generation(**{**SERVER, "api_key": "fq_wrong"})


checks.main()
