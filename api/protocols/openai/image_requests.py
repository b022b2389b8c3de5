"""OpenAI image requests as job requests, and image jobs as OpenAI responses."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.request import JobRequest, valid_fields
from api.jobs.resolve import parse_checked
from api.protocols.openai.server_fields import Warnings, own_fields
from shared.config.catalog import Catalog
from shared.errors import Faults, InvalidRequest, first_of
from shared.job import Job
from shared.job_fields import Priority
from shared.job_record import JobRecord
from shared.tasks import Task

Fields = TypeVar("Fields", bound=BaseModel)
Kind = Literal["image_generation", "image_edit"]

_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


class ImageFields(BaseModel):
    """OpenAI's own fields of an image request; job fields are allowed at the top level too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: str | None = Field(None, description="`WxH` in pixels; `auto`: the model's default.")
    response_format: Literal["url", "b64_json"] | None = Field(
        None, description="Default: both. A URL is signed and needs no key."
    )
    output_format: Literal["png", "webp", "jpeg"] | None = None
    output_compression: int | None = Field(None, strict=True, ge=0, le=100, description="Not for PNG.")
    stream: bool = Field(False, strict=True, description="Respond with server-sent events.")
    partial_images: int = Field(0, strict=True, ge=0, le=3, description="Previews per image, with `stream`.")
    quality: str | None = Field(None, max_length=64, description="Accepted and echoed; use `steps` instead.")
    background: Literal["auto", "opaque", "transparent"] | None = Field(
        None, description="`transparent`: only for models that make layers."
    )
    moderation: str | None = Field(None, max_length=64, description="Accepted and ignored.")
    style: str | None = Field(None, max_length=64, description="Accepted and ignored.")
    input_fidelity: str | None = Field(None, max_length=64, description="Accepted and ignored; use `strength` instead.")
    user: str | None = Field(None, max_length=512, description="Accepted and not stored.")


@dataclass(frozen=True)
class ImageRequest:
    """Parsed image request; `kind` is the prefix of stream event names."""

    request: JobRequest
    fields: ImageFields
    kind: Kind
    warnings: Warnings = ()

    @property
    def previews(self) -> int:
        """Previews per image; 0 without a stream that sends them."""
        return self.fields.partial_images if self.fields.stream else 0


def parse_image_request(body: Any, catalog: Catalog, kind: Kind) -> ImageRequest:
    """Parse the body of `/v1/images/...`; raises `InvalidRequest` with all invalid fields.

    Default model: the first of the catalog.
    """
    faults = Faults()
    fields, values, warnings = split_fields(body, ImageFields, faults)
    values.setdefault("model", next(iter(catalog)).id)
    values.setdefault("priority", Priority.INTERACTIVE.value)
    _set_images(values)
    if fields.output_format is not None:
        values["output_format"] = fields.output_format
    if fields.output_compression is not None:
        values["output_quality"] = max(1, fields.output_compression)
    spec = catalog.find(values["model"])
    if spec is not None and fields.background == "transparent" and not spec.defaults.layers:
        message = f"background: model {spec.id!r} makes opaque images only"
        faults.found.append(InvalidRequest(message, param="background"))
    request, task = parse_sized(values, fields.size, catalog, faults)
    if task.makes_video:
        raise InvalidRequest(f"model {request.model!r} makes videos; use /v1/videos or /v1/jobs", param="model")
    if task.makes_audio:
        raise InvalidRequest(f"model {request.model!r} makes sounds; use /v1/jobs", param="model")
    return ImageRequest(request, fields, kind, warnings)


def split_fields(body: Any, kind: type[Fields], faults: Faults) -> tuple[Fields, dict[str, Any], Warnings]:
    """Return OpenAI's own fields of a body, its other fields, and warnings about fields without effect.

    The faults of OpenAI's own fields are collected.
    """
    values, warnings = own_fields(body)
    fields = valid_fields(kind, {name: values.pop(name) for name in kind.model_fields if name in values}, faults)
    return fields, values, warnings


def require_image(request: JobRequest) -> None:
    """Raise `InvalidRequest` for an edit without an image."""
    if request.image is None and request.images is None:
        raise InvalidRequest("image: required for an edit", param="image")


def _set_images(values: dict[str, Any]) -> None:
    """Normalize images given as `{"image_url": ...}` or as lists to the fields of a job."""
    for name in {"image", "images", "mask"} & values.keys():
        value = values[name]
        values[name] = list(map(image_reference, value)) if isinstance(value, list) else image_reference(value)
    if isinstance(values.get("image"), list) and "images" not in values:
        values["images"] = values.pop("image")
    if isinstance(values.get("images"), list) and len(values["images"]) == 1 and "image" not in values:
        values["image"] = values.pop("images")[0]


def image_reference(value: Any) -> Any:
    """Return the image of `value`, which can be wrapped as `{"image_url": ...}` or `{"file_id": ...}`."""
    if isinstance(value, Mapping) and len(value) == 1:
        reference = value.get("image_url", value.get("file_id"))
        return value if reference is None else reference
    return value


def parse_sized(values: dict[str, Any], size: str | None, catalog: Catalog, faults: Faults) -> tuple[JobRequest, Task]:
    """Return the job request of a body with OpenAI's `size`, and its task; raises `InvalidRequest` with all faults.

    A fault of width or height names `size` if it was sent.
    """
    with faults.collected():
        _set_size(values, size)
    try:
        return parse_checked(values, catalog.get, faults)
    except InvalidRequest as error:
        raise first_of([_about_size(fault) if size is not None else fault for fault in error.faults]) from None


def _set_size(values: dict[str, Any], size: str | None) -> None:
    if size is None or size == "auto":
        return
    match = _SIZE.fullmatch(size)
    if match is None:
        raise InvalidRequest(f"size: invalid: {size[:32]}; use WxH, such as 1024x1024, or auto", param="size")
    if "width" in values or "height" in values:
        raise InvalidRequest("size: send either size or width and height", param="size")
    values["width"], values["height"] = int(match[1]), int(match[2])


def _about_size(fault: InvalidRequest) -> InvalidRequest:
    if fault.param not in ("width", "height"):
        return fault
    return InvalidRequest(f"size: {fault.message}", param="size")


def has_base64(response_format: str | None) -> bool:
    """Return whether a response has its images as base64: by default beside URLs, since clients that name no format
    read one or the other."""
    return response_format != "url"


def image_data(
    record: JobRecord,
    images: Sequence[str],
    base_url: str,
    *,
    response_format: str | None,
    sign: Callable[[str, int], str],
) -> list[dict[str, Any]]:
    """Return each image as `response_format` says: as base64 (of `images`), a URL with the query of `sign`, or both."""
    job_id, data = record.job.id, []
    for at, artifact in enumerate(record.artifacts):
        entry: dict[str, Any] = {"revised_prompt": None, "seed": artifact.seed, "flagged": artifact.flagged}
        if has_base64(response_format):
            entry["b64_json"] = images[at]
        if response_format != "b64_json":
            entry["url"] = f"{base_url}/v1/jobs/{job_id}/artifacts/{artifact.index}{sign(job_id, artifact.index)}"
        data.append(entry)
    return data


def images_object(
    record: JobRecord, data: list[dict[str, Any]], quality: str | None, warnings: Warnings
) -> dict[str, Any]:
    """Return the response body of a job that succeeded."""
    return {
        "id": record.job.id,
        "created": created_s(record),
        "data": data,
        **response_fields(record.job, quality),
        "usage": usage(record.job),
        "warnings": [warning.model_dump() for warning in (*warnings, *record.warnings)],
    }


def response_fields(job: Job, quality: str | None) -> dict[str, str]:
    """Return the fields that responses and stream events share."""
    return {
        "size": f"{job.width}x{job.height}",
        "quality": quality or "auto",
        "output_format": job.output_format.value,
        "background": "transparent" if job.layers else "opaque",
    }


def usage(job: Job) -> dict[str, Any]:
    """Return OpenAI's usage object: token counts are 0, images and steps are added."""
    return {
        "total_tokens": 0,
        "input_tokens": 0,
        "output_tokens": 0,
        "input_tokens_details": {"text_tokens": 0, "image_tokens": 0},
        "images": job.n,
        "steps": job.steps * job.n,
    }


def created_s(record: JobRecord) -> int:
    """Return the time of the result in epoch seconds."""
    return (record.finished_at_ms or record.job.created_at_ms) // 1000
