"""From the fields that a program gives to the job and the files that the engine takes."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from api.jobs.job_builder import with_inputs
from api.jobs.request import JobRequest, parse
from api.jobs.request_images import Inputs, check_kind, check_proportions
from api.jobs.resolve import max_batch_for, resolve_for_model
from library.input_files import file_of
from shared.config.adapters import resolve_adapters
from shared.config.catalog import Catalog
from shared.config.settings import Settings
from shared.errors import InvalidRequest
from shared.inputs.validation import ImageFile
from shared.job import InputRef, Job
from shared.runtime.clock import now_ms
from worker.engine.protocol import InputFiles

Fields: TypeAlias = Mapping[str, Any]
TENANT = "default"
# They are about the service: its queue, its storage and its callers.
_OF_THE_SERVICE = (
    *("webhook", "webhook_events", "output", "priority"),
    *("deadline_s", "on_deadline", "not_before", "after", "on_parent_failure", "batch_id", "group"),
)
_PLACEHOLDER = "in_00000000000000000000000000000000"
_FILES = ("image", "mask", "last_image", "video", "face_video", "audio")
_LISTS = ("images", "controls")


def job_of(fields: Fields, catalog: Catalog, settings: Settings, previews: int = 0) -> tuple[Job, InputFiles]:
    """Return the job of some fields, with all defaults chosen, and the files of its images, video and sound.

    Raises `InvalidRequest` with the faults of all fields.
    """
    for name in _OF_THE_SERVICE:
        if fields.get(name) is not None:
            raise InvalidRequest(f"{name}: only the service has it", param=name)
    _check_forms(fields)
    images = dict(_images(fields))
    request = parse(_plain(_with_placeholders(fields)))
    spec = catalog.get(request.model)
    files = {param: file_of(value, param, settings.max_input_pixels) for param, value in images.items()}
    job = resolve_for_model(request, spec, TENANT, now_ms())
    adapters = resolve_adapters(request.adapters, spec.adapter, spec.limits.max_adapters)
    job = job.model_copy(update={"adapters": adapters, "previews": previews})
    refs = {param: _reference(file) for param, file in files.items()}
    for param, ref in refs.items():
        check_kind(ref, param)
    inputs = _inputs(request, refs)
    check_proportions(inputs)
    job = with_inputs(job, request, spec, inputs)
    max_batch_for(job, catalog)
    return job, _input_files(request, {param: file.data for param, file in files.items()})


def _check_forms(fields: Fields) -> None:
    """Raise `InvalidRequest` for a prompt that is no text, and for a list that is something else."""
    if "prompt" in fields and not isinstance(fields["prompt"], str):
        kind = type(fields["prompt"]).__name__
        raise InvalidRequest(f"prompt: it must be a text, or the fields of an item, not {kind}", param="prompt")
    for name in _LISTS:
        value = fields.get(name)
        if value is not None and not isinstance(value, list | tuple):
            raise InvalidRequest(f"{name}: it must be a list, not {type(value).__name__}", param=name)


def _plain(value: Any) -> Any:
    """Return a value of fields with numbers of numpy and others as those of Python."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _images(fields: Fields) -> Iterator[tuple[str, Any]]:
    """Yield the images, the video and the sound of fields by path, as `JobRequest.references` names them."""
    for name in _FILES:
        if fields.get(name) is not None:
            yield name, fields[name]
    for at, image in enumerate(fields.get("images") or ()):
        yield f"images.{at}", image
    for at, control in enumerate(fields.get("controls") or ()):
        if isinstance(control, Mapping) and control.get("image") is not None:
            yield f"controls.{at}.image", control["image"]


def _with_placeholders(fields: Fields) -> dict[str, Any]:
    """Return fields with ids of inputs in place of their images."""
    body = dict(fields)
    body.update({name: _PLACEHOLDER for name in _FILES if fields.get(name) is not None})
    if fields.get("images"):
        body["images"] = [_PLACEHOLDER for _ in fields["images"]]
    if fields.get("controls"):
        body["controls"] = [
            {**one, "image": _PLACEHOLDER} if isinstance(one, Mapping) and one.get("image") is not None else one
            for one in fields["controls"]
        ]
    return body


def _reference(file: ImageFile) -> InputRef:
    key = f"in_{hashlib.sha256(file.data).hexdigest()[:32]}"
    return InputRef(
        id=key,
        key=key,
        content_type=file.content_type,
        bytes=len(file.data),
        width=file.width,
        height=file.height,
        frames=file.frames,
        fps=file.fps,
        hidden_frames=file.hidden_frames,
        duration_s=file.duration_s,
    )


def _inputs(request: JobRequest, refs: Mapping[str, InputRef]) -> Inputs:
    return Inputs(
        images=tuple(refs[param] for param in request.image_values),
        mask=refs.get("mask"),
        last_image=refs.get("last_image"),
        video=refs.get("video"),
        face_video=refs.get("face_video"),
        controls=tuple(refs[f"controls.{at}.image"] for at in range(len(request.controls))),
        audio=refs.get("audio"),
    )


def _input_files(request: JobRequest, data: Mapping[str, bytes]) -> InputFiles:
    return InputFiles(
        images=tuple(data[param] for param in request.image_values),
        mask=data.get("mask"),
        last_image=data.get("last_image"),
        video=data.get("video"),
        face_video=data.get("face_video"),
        controls=tuple(data[f"controls.{at}.image"] for at in range(len(request.controls))),
        audio=data.get("audio"),
    )
