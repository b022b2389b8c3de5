"""The `input` of a prediction as a job request, with the field names of Replicate's popular models."""

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.request import JobRequest, valid_fields
from api.jobs.resolve import parse_checked
from api.protocols.adapter_names import MAX_CHARS, adapter_named
from api.protocols.field_names import FieldNames
from api.protocols.single_results import check_single
from shared.config.model_spec import ModelSpec
from shared.config.refiners import NONE
from shared.errors import Faults, InvalidRequest
from shared.tasks import Task

JOB_FIELDS: Mapping[str, str] = {
    "num_outputs": "n",
    "num_inference_steps": "steps",
    "guidance": "guidance_scale",
    "prompt_strength": "strength",
    "input_image": "image",
    "init_image": "image",
    "input_images": "images",
    "image_input": "images",
    "num_frames": "frames",
    "frames_per_second": "fps",
}
"""Job fields by Replicate's names."""

REPLICATE_NAMES: Mapping[str, str] = {
    "n": "num_outputs",
    "steps": "num_inference_steps",
    "strength": "prompt_strength",
    "frames": "num_frames",
}
"""Replicate's names of job fields in published schemas."""

EXCLUDED = ("model", "webhook", "webhook_events", "batch_id")
"""Job fields that are not allowed in the input."""

_IMAGE_FIELDS = {"image", "images"}
_SIZE_FIELDS = ("size", "aspect_ratio", "megapixels")
_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
_FILE_URL = re.compile(r"https?://[^/]+(?:/[^?#]*)?/compat/replicate/v1/files/(in_[0-9a-f]{32})")
_HIGH_NOISE_FRAC = 0.8  # Replicate's default
_UNTYPED = "data:application/octet-stream;"


class ReplicateFields(BaseModel):
    """Input fields without an equal job field."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    aspect_ratio: str | None = Field(
        None,
        pattern=r"^([1-9]\d?:[1-9]\d?|custom|match_input_image)$",
        description="Such as 16:9, with about the pixels of the model's default size; `custom`: width and height.",
    )
    megapixels: float | None = Field(None, gt=0, le=64, description="1 is 1024x1024 pixels.")
    output_format: Literal["png", "jpg", "jpeg", "webp", "mp4", "wav", "flac", "mp3", "opus"] | None = None
    output_quality: int | None = Field(None, strict=True, ge=0, le=100)
    lora_weights: str | None = Field(
        None, max_length=MAX_CHARS, description="Id of an adapter, a URL, or `owner/name` on the hub."
    )
    lora_scale: float | None = Field(None, strict=True)
    go_fast: bool = Field(False, strict=True, description="Accepted and ignored.")
    disable_safety_checker: bool = Field(False, strict=True, description="Allowed only for models without one.")
    apply_watermark: bool = Field(False, strict=True, description="Accepted and ignored: no watermark is made.")
    size: str | None = Field(None, max_length=32, description="`WxH` in pixels, such as 1024x1024.")
    refine: Literal["no_refiner", "expert_ensemble_refiner", "base_image_refiner"] | None = Field(
        None, description="`expert_ensemble_refiner` only of models with a refiner; not `base_image_refiner`."
    )
    high_noise_frac: float | None = Field(
        None,
        ge=0,
        le=1,
        description="With `expert_ensemble_refiner`: the share of the steps before it, 0.8 if unset.",
    )
    refine_steps: int | None = Field(None, description="Accepted and ignored: of `base_image_refiner` only.")


def parse_input(
    input_values: Mapping[str, Any], spec: ModelSpec, defaults: Mapping[str, Any]
) -> tuple[JobRequest, FieldNames]:
    """Return the job request of an input, and its field names for later errors.

    `defaults` are job fields that the input can override. Raises `InvalidRequest` with all invalid fields.
    """
    values, faults = {name: value for name, value in input_values.items() if value is not None}, Faults()
    for name in EXCLUDED:
        if values.pop(name, None) is not None:
            faults.found.append(InvalidRequest(f"input.{name}: there is no such field", param=f"input.{name}"))
    job_fields = _job_fields(values, faults)
    own = {name: values.pop(name) for name in ReplicateFields.model_fields if name in values}
    if not _IMAGE_FIELDS & {job_fields.get(name, name) for name in values}:
        values.pop("prompt_strength", None)  # a default of SDXL and FLUX, which clients send without an image too
    fields = valid_fields(ReplicateFields, own, faults)
    body = {job_fields.get(name, name): value for name, value in values.items()}
    body |= _converted(fields, body, spec, faults)
    for name in ("image", "images", "mask", "last_image", "video", "face_video", "audio"):
        if name in body:
            body[name] = _image_values(body[name])
    size = next((name for name in _SIZE_FIELDS if getattr(fields, name) is not None), "")
    sources = {"width": size, "height": size, "adapters": "lora_weights", "adapters.0.scale": "lora_scale"}
    sources["refiner_start"] = "refine" if fields.high_noise_frac is None else "high_noise_frac"
    converted = body.keys() - values.keys()
    aliases = {field: name for name, field in job_fields.items()}
    renamed = {**aliases, **{field: name for field, name in sources.items() if field.partition(".")[0] in converted}}
    names = FieldNames(renamed, "input.", scalars=tuple(ReplicateFields.model_fields), kept=(*EXCLUDED, "input"))
    with names.in_errors():
        request, task = parse_checked({**defaults, **body, "model": spec.id}, lambda _: spec, faults)
        check_single(request, task)
    return request, names


def _job_fields(values: dict[str, Any], faults: Faults) -> dict[str, str]:
    """Return the job field of each aliased input field; of two that mean the same, the second is a fault."""
    fields: dict[str, str] = {}
    for name in [name for name in values if name in JOB_FIELDS]:
        field = JOB_FIELDS[name]
        first = next((other for other in fields if fields[other] == field), field if field in values else None)
        if first is None:
            fields[name] = field
        else:
            del values[name]
            message = f"input.{name}: send either {first} or {name}"
            faults.found.append(InvalidRequest(message, param=f"input.{name}"))
    return fields


def _converted(other: ReplicateFields, body: Mapping[str, Any], spec: ModelSpec, faults: Faults) -> dict[str, Any]:
    """Return the job fields of Replicate's own fields, and collect the faults of these."""
    fields: dict[str, Any] = {}
    if other.output_format is not None:
        fields["output_format"] = "jpeg" if other.output_format == "jpg" else other.output_format
    if other.output_quality is not None:
        fields["output_quality"] = max(1, other.output_quality)
    if other.lora_weights is not None and "adapters" in body:
        message = "lora_weights: send either lora_weights or adapters"
        faults.found.append(InvalidRequest(message, param="lora_weights"))
    elif other.lora_weights is not None:
        scale = {} if other.lora_scale is None else {"scale": other.lora_scale}
        fields["adapters"] = [{**adapter_named(other.lora_weights, {one.id for one in spec.adapter}), **scale}]
    if other.disable_safety_checker and spec.safety_checker:
        message = f"disable_safety_checker: only the operator can disable that of model {spec.id!r}"
        faults.found.append(InvalidRequest(message, param="disable_safety_checker"))
    with faults.collected():
        fields |= _refiner_start(other, body, spec)
    with faults.collected():
        fields |= _size(other, body, spec)
    return fields


def _refiner_start(other: ReplicateFields, body: Mapping[str, Any], spec: ModelSpec) -> dict[str, float]:
    if other.refine is None:
        return {}
    if "refiner_start" in body:
        raise InvalidRequest("refine: send either refine or refiner_start", param="refine")
    if other.refine == "base_image_refiner":
        message = "refine: base_image_refiner is not supported; use expert_ensemble_refiner or no_refiner"
        raise InvalidRequest(message, param="refine")
    if other.refine == "no_refiner":
        return {} if spec.refiner is None else {"refiner_start": NONE}
    if spec.refiner is None:
        raise InvalidRequest(f"refine: model {spec.id!r} has no refiner; use no_refiner", param="refine")
    return {"refiner_start": _HIGH_NOISE_FRAC if other.high_noise_frac is None else other.high_noise_frac}


def _size(other: ReplicateFields, body: Mapping[str, Any], spec: ModelSpec) -> dict[str, int]:
    ratio = other.aspect_ratio
    if other.size is not None:
        return _explicit_size(other.size, other, body)
    if ratio in ("custom", "match_input_image"):
        _check_named_ratio(ratio, other, body, spec)
        return {}
    if ratio is None and other.megapixels is None:
        return {}
    if {"width", "height"} & body.keys():
        field = "aspect_ratio" if ratio is not None else "megapixels"
        raise InvalidRequest(f"{field}: send either {field} or width and height", param=field)
    default = spec.defaults
    across, down = (default.width, default.height) if ratio is None else (int(part) for part in ratio.split(":"))
    pixels = default.width * default.height if other.megapixels is None else math.ceil(other.megapixels * 1024 * 1024)
    width, height = size_for(across / down, pixels, spec)
    return {"width": width, "height": height}


def _explicit_size(size: str, other: ReplicateFields, body: Mapping[str, Any]) -> dict[str, int]:
    match = _SIZE.fullmatch(size)
    if match is None:
        raise InvalidRequest(f"size: invalid: {size}; use WxH, such as 1024x1024", param="size")
    if {"width", "height"} & body.keys() or other.aspect_ratio is not None or other.megapixels is not None:
        raise InvalidRequest("size: send either size, width and height, or aspect_ratio and megapixels", param="size")
    return {"width": int(match[1]), "height": int(match[2])}


def _check_named_ratio(ratio: str, other: ReplicateFields, body: Mapping[str, Any], spec: ModelSpec) -> None:
    """Raise `InvalidRequest` unless `custom` has a size, or `match_input_image` an image."""
    if other.megapixels is not None:
        raise InvalidRequest(f"megapixels: send either megapixels or aspect_ratio {ratio}", param="megapixels")
    if ratio == "custom" and not {"width", "height"} <= body.keys():
        raise InvalidRequest("aspect_ratio: custom needs width and height", param="aspect_ratio")
    follows_image = {Task.EDIT, Task.IMAGE_TO_IMAGE, Task.INPAINT}.intersection(spec.tasks)
    if ratio == "match_input_image" and (not follows_image or not {"image", "images"} & body.keys()):
        message = f"aspect_ratio: match_input_image needs an image, and a model that changes images: {spec.id}"
        raise InvalidRequest(message, param="aspect_ratio")


def size_for(ratio: float, pixels: int, spec: ModelSpec) -> tuple[int, int]:
    """Return the supported width and height nearest to `ratio` and `pixels`, not below the model's minimum."""
    step, min_side = spec.limits.multiple_of, spec.limits.min_side
    width, height = math.sqrt(pixels * ratio), math.sqrt(pixels / ratio)
    factor = max(1.0, min_side / min(width, height))
    lowest = -(-min_side // step) * step
    across, down = (max(lowest, round(side * factor / step) * step) for side in (width, height))
    return across, down


def _image_values(value: Any) -> Any:
    """Return images as job fields: uploaded files by their input ids."""
    if isinstance(value, list):
        return [_image_values(item) for item in value]
    if not isinstance(value, str):
        return value
    if value[: len(_UNTYPED)].lower() == _UNTYPED:
        return "data:;" + value[len(_UNTYPED) :]
    match = _FILE_URL.fullmatch(value[:4096])
    return match[1] if match else value
