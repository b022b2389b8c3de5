"""OpenAI's requests for pictures as ours, and our results as their answers: nothing here waits for anything."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.config.models_file import Catalog
from shared.errors import InvalidRequest
from shared.job import Job, JobRecord, Priority
from shared.request import JobRequest, check, parse, validated

_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
_WORD = Annotated[str | None, Field(max_length=64)]
MAX_PARTIAL_IMAGES = 3


class ImageFields(BaseModel):
    """What OpenAI's bodies for pictures hold beside the fields of a job, which may stand at the top level too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: Annotated[str | None, Field(description="`WxH` in pixels; `auto` is the model's own.")] = None
    response_format: Annotated[
        Literal["url", "b64_json"] | None, Field(description="Unset: b64_json. A URL needs no key for a while.")
    ] = None
    output_format: Literal["png", "webp", "jpeg"] | None = None
    output_compression: Annotated[
        int | None, Field(strict=True, ge=0, le=100, description="JPEG's and WebP's quality; PNG has no loss.")
    ] = None
    stream: Annotated[bool, Field(strict=True, description="Answer with Server-Sent Events.")] = False
    partial_images: Annotated[
        int, Field(strict=True, ge=0, le=MAX_PARTIAL_IMAGES, description="Previews on the way, where it streams.")
    ] = 0
    quality: Annotated[_WORD, Field(description="Taken, and told again; `steps` is what makes a difference.")] = None
    background: Annotated[_WORD, Field(description="Taken; pictures are opaque.")] = None
    moderation: Annotated[_WORD, Field(description="Taken, and without a meaning here.")] = None
    style: Annotated[_WORD, Field(description="Taken, and without a meaning here.")] = None
    input_fidelity: Annotated[_WORD, Field(description="Taken; `strength` is what makes a difference.")] = None
    user: Annotated[str | None, Field(max_length=512, description="Taken, and not kept.")] = None


@dataclass(frozen=True)
class ImageRequest:
    """One request for pictures: the job, and how it is to be answered. `kind` begins the names of stream events."""

    request: JobRequest
    fields: ImageFields
    kind: Literal["image_generation", "image_edit"]

    @property
    def previews(self) -> int:
        """How many previews of each picture to make: none where nobody would see them."""
        return self.fields.partial_images if self.fields.stream else 0

    @property
    def by_url(self) -> bool:
        return self.fields.response_format == "url"


def parse_image_request(body: Any, catalog: Catalog, kind: Literal["image_generation", "image_edit"]) -> ImageRequest:
    """Return what a decoded body of `/v1/images/...` asks for, or raise `InvalidRequest` that names the field at fault.

    Without a `model` the first one of the catalog is meant.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("body: it must be a JSON object")
    sent = {name: value for name, value in body.items() if value is not None}  # null is how SDKs leave a field out
    fields = validated(ImageFields, {name: sent.pop(name) for name in ImageFields.model_fields if name in sent})
    if "loras" in sent:
        sent.setdefault("adapters", sent.pop("loras"))
    sent.setdefault("model", next(iter(catalog)).id)
    sent.setdefault("priority", Priority.INTERACTIVE.value)
    _set_pictures(sent)
    set_size(sent, fields.size)
    if fields.output_format is not None:
        sent["output_format"] = fields.output_format
    if fields.output_compression is not None:
        sent["output_quality"] = max(1, fields.output_compression)
    request = parse(sent)
    try:
        task = check(request, catalog.get(request.model))
    except InvalidRequest as error:
        if fields.size is not None and error.param in ("width", "height"):
            raise InvalidRequest(f"size: {error.message}", param="size") from None
        raise
    if task.makes_video:
        raise InvalidRequest(f"model {request.model!r} makes videos: ask /v1/videos, or /v1/jobs", param="model")
    return ImageRequest(request, fields, kind)


def _set_pictures(sent: dict[str, Any]) -> None:
    """Take pictures that are told as `{"image_url": ...}`, as a batch's lines do, or as lists, by our own names."""
    for name in ("image", "images", "mask"):
        if name in sent:
            sent[name] = (
                [image_reference(one) for one in sent[name]]
                if isinstance(sent[name], list)
                else image_reference(sent[name])
            )
    if isinstance(sent.get("image"), list) and "images" not in sent:
        sent["images"] = sent.pop("image")
    if isinstance(sent.get("images"), list) and len(sent["images"]) == 1 and "image" not in sent:
        sent["image"] = sent.pop("images")[0]


def image_reference(value: Any) -> Any:
    """Return the picture that is meant by itself or as `{"image_url": ..}`."""
    if isinstance(value, Mapping) and len(value) == 1:
        return value.get("image_url", value.get("file_id", value))
    return value


def set_size(sent: dict[str, Any], size: str | None) -> None:
    """Take `size` by our own names, or raise `InvalidRequest`."""
    if size in (None, "auto"):
        return
    found = _SIZE.fullmatch(size or "")
    if found is None:
        raise InvalidRequest("size: it must be as 1024x1024, or auto", param="size")
    if "width" in sent or "height" in sent:
        raise InvalidRequest("size: send either size or width and height", param="size")
    sent["width"], sent["height"] = int(found[1]), int(found[2])


def response_fields(job: Job, quality: str | None) -> dict[str, str]:
    """Return what an answer, and each event of a stream, says of all pictures."""
    return {
        "size": f"{job.width}x{job.height}",
        "quality": quality or "auto",
        "output_format": job.output_format.value,
        "background": "transparent" if job.layers else "opaque",
    }


def usage(job: Job) -> dict[str, Any]:
    """Return OpenAI's account of a call: we count no tokens, and tell what was computed instead."""
    return {
        "total_tokens": 0,
        "input_tokens": 0,
        "output_tokens": 0,
        "input_tokens_details": {"text_tokens": 0, "image_tokens": 0},
        "images": job.n,
        "steps": job.steps * job.n,
    }


def created_s(record: JobRecord) -> int:
    """Return when the pictures were made, in seconds since the epoch."""
    return (record.finished_at_ms or record.job.created_at_ms) // 1000
