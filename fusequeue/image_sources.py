"""Images among a job's parameters: what the service reads itself, and the contents of what is uploaded."""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from fusequeue.params import ImageFile, PillowImage, ReadableFile, StrPath
from fusequeue.resources import Artifact, Job

IMAGE_FIELDS = ("image", "mask", "last_image")
FOREIGN = re.compile(r"(in|job)_[0-9A-Za-z]+$|https?:|data:|/v1/")
"""Ids and URLs, which the service reads; any other text is a path. A file of such a name is passed as a `Path`."""


def reference(image: object) -> str | None:
    """Return what names the image to the service; None if it has to be uploaded."""
    if isinstance(image, Job):
        return image.id
    if isinstance(image, Artifact):
        return image.url
    return image if isinstance(image, str) and FOREIGN.match(image) else None


async def content(image: ImageFile) -> tuple[str, bytes]:
    """Return the name and the content of an image's file."""
    if isinstance(image, bytes | bytearray | memoryview):
        return "image", bytes(image)
    if isinstance(image, str | os.PathLike):
        return os.path.basename(image) or "image", await asyncio.to_thread(_read_path, image)
    if isinstance(image, PillowImage):
        return "image.png", await asyncio.to_thread(_png, image)
    if not isinstance(image, ReadableFile):
        raise TypeError(f"not an image: {image!r:.80}; use a path, an open file, bytes, or an image of Pillow")
    data: object = await asyncio.to_thread(image.read)
    if not isinstance(data, bytes):
        raise TypeError("an image's file must be open in binary mode: open(path, 'rb')")
    return "image", data


def _png(image: PillowImage) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _read_path(path: StrPath) -> bytes:
    with open(path, "rb") as file:
        return file.read()


async def with_references(params: Mapping[str, Any], upload: Callable[[Any], Awaitable[str]]) -> dict[str, Any]:
    """Return the parameters that are set, with what the service reads in place of images; uploads the others."""

    async def referred(image: object) -> str:
        return reference(image) or await upload(image)

    body = {name: value for name, value in params.items() if value is not None}
    for name in IMAGE_FIELDS & body.keys():
        body[name] = await referred(body[name])
    for name in {"images", "controls"} & body.keys():
        if isinstance(body[name], str | bytes) or not isinstance(body[name], Iterable):
            raise TypeError(f"{name}: {body[name]!r:.80} is not a list")
    if "images" in body:
        body["images"] = [await referred(image) for image in body["images"]]
    if "controls" in body:
        body["controls"] = [
            {**control, "image": await referred(control["image"])} if "image" in control else control
            for control in body["controls"]
        ]
    return body
