"""Images, videos and sounds of a job's parameters: what the service reads itself, and the contents to upload."""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from fusequeue.errors import Invalid, InvalidArgument
from fusequeue.params import ImageFile, PillowImage, ReadableFile, StrPath
from fusequeue.response_types import Artifact, Job, Result

IMAGE_FIELDS = ("image", "mask", "last_image", "video", "face_video", "audio")
FOREIGN = re.compile(r"(in|job)_[0-9A-Za-z]+$|https?:|data:|/v1/")
"""Ids and URLs, which the service reads; any other text is a path. A file of such a name is passed as a `Path`."""


def reference(image: object) -> str | Mapping[str, Any] | None:
    """Return what names the image to the service; None if it has to be uploaded."""
    if isinstance(image, Mapping):  # an `ArtifactParams`; the service says what is wrong with any other
        return {**image, "job": image["job"].id} if isinstance(image.get("job"), Job) else image
    if isinstance(image, Job):
        return image.id
    if isinstance(image, Result):
        return image.job.id
    if isinstance(image, Artifact):
        return image.url
    return image if isinstance(image, str) and FOREIGN.match(image) else None


async def content(image: ImageFile) -> tuple[str, bytes]:
    """Return the name and the content of an image's file; OSError if it cannot be read."""
    if isinstance(image, bytes | bytearray | memoryview):
        return "image", bytes(image)
    if isinstance(image, str | os.PathLike):
        return os.path.basename(image) or "image", await asyncio.to_thread(_read_path, image)
    if isinstance(image, ReadableFile):  # before images of Pillow: uploads of web frameworks have `save` too
        data: object = await asyncio.to_thread(image.read)
        if not isinstance(data, bytes):
            raise InvalidArgument("an image's file must be open in binary mode: open(path, 'rb')")
        return "image", data
    if isinstance(image, PillowImage):
        return "image.png", await asyncio.to_thread(_png, image)
    raise InvalidArgument(f"not an image: {image!r:.80}; use a path, an open file, bytes, or an image of Pillow")


def _png(image: PillowImage) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _read_path(path: StrPath) -> bytes:
    with open(path, "rb") as file:
        return file.read()


async def with_references(params: Mapping[str, Any], upload: Callable[[Any], Awaitable[str]]) -> dict[str, Any]:
    """Return the parameters that are set, with what the service reads in place of images; uploads the others."""

    async def referred(name: str, image: object) -> str | Mapping[str, Any]:
        try:
            return reference(image) or await upload(image)
        except InvalidArgument as error:
            raise InvalidArgument(f"{name}: {error}") from error
        except Invalid as error:
            error.rename(name)
            raise

    async def with_image(name: str, control: object) -> object:
        if not isinstance(control, Mapping) or "image" not in control:
            return control  # the service says what is wrong with it
        return {**control, "image": await referred(f"{name}.image", control["image"])}

    body = {name: value for name, value in params.items() if value is not None}
    for name in IMAGE_FIELDS:
        if name in body:
            body[name] = await referred(name, body[name])
    for name, read in (("images", referred), ("controls", with_image)):
        if name in body:
            body[name] = [await read(f"{name}.{at}", item) for at, item in enumerate(_items(name, body[name]))]
    return body


def _items(name: str, value: object) -> Iterable[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidArgument(f"{name}: {value!r:.80} is not a list")
    return value
