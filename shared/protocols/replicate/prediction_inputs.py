"""The `input` of a prediction as a job's request, by the names that the popular models of Replicate have for things."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.config.models_file import ModelSpec
from shared.errors import InvalidRequest
from shared.job import Task
from shared.job_builder import check_limits
from shared.request import JobRequest, parse, validated

NAMES: Mapping[str, str] = {
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
"""Their names of fields that are ours, by another name."""

USUAL_NAMES: Mapping[str, str] = {
    "n": "num_outputs",
    "steps": "num_inference_steps",
    "strength": "prompt_strength",
    "frames": "num_frames",
}
"""By which of their names we tell fields that are ours by another."""

OUTSIDE = ("model", "webhook", "webhook_events", "batch_id")
"""Fields of a job that stand beside the input, or have no place in it."""

_SCHEDULERS = {
    "DPMSolverMultistep": "DPMSolverMultistepScheduler",
    "HeunDiscrete": "HeunDiscreteScheduler",
    "KLMS": "LMSDiscreteScheduler",
    "K_EULER": "EulerDiscreteScheduler",
    "K_EULER_ANCESTRAL": "EulerAncestralDiscreteScheduler",
    "DDIM": "DDIMScheduler",
    "PNDM": "PNDMScheduler",
}
_FILE_URL = re.compile(r"https?://[^/]+(?:/[^?#]*)?/compat/replicate/v1/files/(in_[0-9a-f]{32})")
_UNTYPED = "data:application/octet-stream;"
MEGAPIXEL = 1024 * 1024


class OtherFields(BaseModel):
    """What their inputs hold beside the fields of a job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    aspect_ratio: Annotated[
        str | None,
        Field(
            pattern=r"^([1-9]\d?:[1-9]\d?|custom|match_input_image)$",
            description="Such as 16:9, with about as many pixels as the model's own size; `custom`: width and height.",
        ),
    ] = None
    megapixels: Annotated[float | None, Field(gt=0, le=64, description="Of 1024x1024 pixels.")] = None
    output_format: Literal["png", "jpg", "jpeg", "webp", "mp4"] | None = None
    output_quality: Annotated[int | None, Field(strict=True, ge=0, le=100)] = None
    lora_weights: Annotated[str | None, Field(max_length=128, description="An adapter that the model lists.")] = None
    lora_scale: Annotated[float | None, Field(strict=True)] = None
    go_fast: Annotated[bool, Field(strict=True, description="Taken, and without a meaning here.")] = False
    disable_safety_checker: Annotated[bool, Field(strict=True, description="Only where the model has none.")] = False
    apply_watermark: Annotated[bool, Field(strict=True, description="Must be false: there are none.")] = False


@dataclass(frozen=True)
class Naming:
    """By which names a request told fields: errors that name ours are told by theirs."""

    names: Mapping[str, str]

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Let what is raised within name the field of the input as the client knows it."""
        try:
            yield
        except InvalidRequest as error:
            raise self._renamed(error) from error

    def _renamed(self, error: InvalidRequest) -> InvalidRequest:
        root, dot, rest = (error.param or "").partition(".")
        if not root or root in OUTSIDE or root == "input":
            return error
        name = self.names.get(root, root)
        if name in OtherFields.model_fields:  # it has no parts, whatever was made of it
            root, dot, rest = root + dot + rest, "", ""
        sent = f"input.{name}"
        words = re.sub(rf"^{re.escape(root)}\b", sent, error.message)
        if words == error.message:
            words = f"{sent}: {words}"
        return type(error)(words, param=sent + dot + rest)


def request_of(told: Mapping[str, Any], spec: ModelSpec, beside: Mapping[str, Any]) -> tuple[JobRequest, Naming]:
    """Return the job that an input asks of a model, and how to name its fields in later errors.

    `beside` are fields of the job that hold where the input does not tell them. Raises `InvalidRequest` that names the
    field at fault.
    """
    sent = {name: value for name, value in told.items() if value is not None}
    names = _ours(sent)
    naming = Naming({our: name for name, our in names.items()})
    with naming.told():
        for name in OUTSIDE:
            if name in sent:
                raise InvalidRequest(f"input.{name}: there is no such field", param=f"input.{name}")
        other = validated(OtherFields, {name: sent.pop(name) for name in OtherFields.model_fields if name in sent})
        body = {names.get(name, name): value for name, value in sent.items()}
        body |= _of_others(other, body, spec)
        for name in ("image", "images", "mask", "last_image"):
            if name in body:
                body[name] = _pictures(body[name])
        if isinstance(body.get("scheduler"), str):
            body["scheduler"] = _SCHEDULERS.get(body["scheduler"], body["scheduler"])
    naming = Naming({**naming.names, **_made_of(other, body.keys() - sent.keys())})
    with naming.told():
        request = parse({**beside, **body, "model": spec.id})
        check_limits(request, spec)
    return request, naming


def _made_of(other: OtherFields, made: Set[str]) -> dict[str, str]:
    """Return from which of their fields those of ours were made that were not sent."""
    sized = "aspect_ratio" if other.aspect_ratio is not None else "megapixels"
    found = {"width": sized, "height": sized, "adapters": "lora_weights"}
    return {ours: name for ours, name in found.items() if ours in made}


def _ours(sent: Mapping[str, Any]) -> dict[str, str]:
    """Return by which of our names each field of theirs goes; raises where two are told for one."""
    names: dict[str, str] = {}
    for name in sent:
        ours = NAMES.get(name)
        if ours is None:
            continue
        first = next((other for other in names if names[other] == ours), ours if ours in sent else None)
        if first is not None:
            raise InvalidRequest(f"input.{name}: send either {first} or {name}", param=f"input.{name}")
        names[name] = ours
    return names


def _of_others(other: OtherFields, body: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if other.output_format is not None:
        found["output_format"] = "jpeg" if other.output_format == "jpg" else other.output_format
    if other.output_quality is not None:
        found["output_quality"] = max(1, other.output_quality)
    if other.lora_weights is not None:
        if "adapters" in body:
            raise InvalidRequest("lora_weights: send either lora_weights or adapters", param="lora_weights")
        scale = {} if other.lora_scale is None else {"scale": other.lora_scale}
        found["adapters"] = [{"id": other.lora_weights, **scale}]
    elif other.lora_scale is not None:
        raise InvalidRequest("lora_scale needs lora_weights to go with", param="lora_scale")
    if other.disable_safety_checker and spec.safety_checker:
        raise InvalidRequest(
            f"disable_safety_checker: that of model {spec.id!r} is for the operator to switch off",
            param="disable_safety_checker",
        )
    if other.apply_watermark:
        raise InvalidRequest("apply_watermark: pictures get no watermark here", param="apply_watermark")
    return found | _size(other, body, spec)


def _size(other: OtherFields, body: Mapping[str, Any], spec: ModelSpec) -> dict[str, int]:
    ratio = other.aspect_ratio
    if ratio in ("custom", "match_input_image"):
        _check_word(ratio, other, body, spec)
        return {}
    if ratio is None and other.megapixels is None:
        return {}
    if {"width", "height"} & body.keys():
        told = "aspect_ratio" if ratio is not None else "megapixels"
        raise InvalidRequest(f"{told}: send either {told} or width and height", param=told)
    own = spec.defaults
    across, down = (own.width, own.height) if ratio is None else (int(part) for part in ratio.split(":"))
    pixels = own.width * own.height if other.megapixels is None else round(other.megapixels * MEGAPIXEL)
    width, height = size_for(across / down, pixels, spec)
    return {"width": width, "height": height}


def _check_word(ratio: str, other: OtherFields, body: Mapping[str, Any], spec: ModelSpec) -> None:
    """Raise `InvalidRequest` unless a ratio that is told by a word is one: of the client's size, or of its picture."""
    if other.megapixels is not None:
        raise InvalidRequest(f"megapixels: send either megapixels or aspect_ratio {ratio}", param="megapixels")
    if ratio == "custom" and not {"width", "height"} <= body.keys():
        raise InvalidRequest("aspect_ratio: custom needs width and height", param="aspect_ratio")
    if ratio == "match_input_image" and (Task.EDIT not in spec.tasks or not {"image", "images"} & body.keys()):
        raise InvalidRequest(f"aspect_ratio: model {spec.id!r} matches no picture", param="aspect_ratio")


def size_for(ratio: float, pixels: int, spec: ModelSpec) -> tuple[int, int]:
    """Return a width and height of about `ratio` and `pixels`, in the model's steps; the shorter side is at least its
    least."""
    step, least = spec.limits.multiple_of, spec.limits.min_side
    width, height = math.sqrt(pixels * ratio), math.sqrt(pixels / ratio)
    larger = max(1.0, least / min(width, height))
    lowest = -(-least // step) * step
    across, down = (max(lowest, round(side * larger / step) * step) for side in (width, height))
    return across, down


def _pictures(value: Any) -> Any:
    """Return pictures as ours name them: files that were uploaded by their ids."""
    if isinstance(value, list):
        return [_pictures(one) for one in value]
    if not isinstance(value, str):
        return value
    if value[: len(_UNTYPED)].lower() == _UNTYPED:
        return "data:;" + value[len(_UNTYPED) :]
    found = _FILE_URL.fullmatch(value[:4096])
    return found[1] if found else value
