"""From the fields that a program gives to the job and the files that the engine takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from api.jobs.job_builder import with_inputs
from api.jobs.request import JobRequest, parse
from api.jobs.request_images import Inputs, check_kind, check_proportions
from api.jobs.resolve import max_batch_for, resolve_for_model
from shared.config.adapters import resolve_adapters
from shared.config.models_file import Catalog
from shared.config.settings import Settings
from shared.errors import InvalidRequest
from shared.inputs.validation import ImageFile, inspect
from shared.job import InputRef, Job
from shared.runtime.clock import now_ms
from worker.engine.protocol import InputFiles

Fields: TypeAlias = Mapping[str, Any]
ImageLike: TypeAlias = Image.Image | bytes | str | Path | np.ndarray
TENANT = "default"
# They are about the service: its queue, its storage and its callers.
_OF_THE_SERVICE = ("webhook", "webhook_events", "output", "priority", "deadline_s", "on_deadline", "batch_id")
_PLACEHOLDER = "in_00000000000000000000000000000000"
_SINGLE = ("image", "mask", "last_image", "video")
_MAX_BYTES = 1 << 30


def job_of(fields: Fields, catalog: Catalog, settings: Settings, previews: int = 0) -> tuple[Job, InputFiles]:
    """Return the job of some fields, with all defaults chosen, and its files.

    Raises `InvalidRequest` with the faults of all fields.
    """
    for name in _OF_THE_SERVICE:
        if fields.get(name) is not None:
            raise InvalidRequest(f"{name}: only the service has it", param=name)
    images = dict(_images(fields))
    request = parse(_with_placeholders(fields))
    spec = catalog.get(request.model)
    files = {param: _file(value, param, settings.max_input_pixels) for param, value in images.items()}
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


def _images(fields: Fields) -> Iterator[tuple[str, Any]]:
    """Yield the images and the video of fields by path, as `JobRequest.references` names them."""
    for name in _SINGLE:
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
    body.update({name: _PLACEHOLDER for name in _SINGLE if fields.get(name) is not None})
    if fields.get("images"):
        body["images"] = [_PLACEHOLDER for _ in fields["images"]]
    if fields.get("controls"):
        body["controls"] = [
            {**one, "image": _PLACEHOLDER} if isinstance(one, Mapping) and one.get("image") is not None else one
            for one in fields["controls"]
        ]
    return body


def _file(value: ImageLike, param: str, max_pixels: int) -> ImageFile:
    """Return an image of any form as a checked file; raises `InvalidRequest` that names its field."""
    return inspect(_bytes(value, param), max_bytes=_MAX_BYTES, max_pixels=max_pixels, param=param)


def _bytes(value: ImageLike, param: str) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray):
        value = Image.fromarray(value)
    if isinstance(value, Image.Image):
        file = BytesIO()
        value.save(file, "PNG", compress_level=1)
        return file.getvalue()
    try:
        return Path(value).read_bytes()
    except TypeError:
        kinds = "a path, bytes, an image of Pillow or an array"
        raise InvalidRequest(f"{param}: it must be {kinds}, not {type(value).__name__}", param=param) from None
    except OSError as error:
        raise InvalidRequest(f"{param}: {value}: {error.strerror}", param=param) from error


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
    )


def _inputs(request: JobRequest, refs: Mapping[str, InputRef]) -> Inputs:
    return Inputs(
        images=tuple(refs[param] for param in request.image_values),
        mask=refs.get("mask"),
        last_image=refs.get("last_image"),
        video=refs.get("video"),
        controls=tuple(refs[f"controls.{at}.image"] for at in range(len(request.controls))),
    )


def _input_files(request: JobRequest, data: Mapping[str, bytes]) -> InputFiles:
    return InputFiles(
        images=tuple(data[param] for param in request.image_values),
        mask=data.get("mask"),
        last_image=data.get("last_image"),
        video=data.get("video"),
        controls=tuple(data[f"controls.{at}.image"] for at in range(len(request.controls))),
    )
