"""fal's queue protocol: inputs of its popular models as job requests, and jobs as queue requests. Pure functions."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.job_object import iso
from api.jobs.request import JobRequest, valid_fields
from api.jobs.resolve import parse_checked
from api.protocols.adapter_names import LoraWeight, adapters_of
from api.protocols.field_names import FieldNames
from api.protocols.job_logs import logs
from api.protocols.model_names import owner_and_name
from api.protocols.single_results import check_single
from shared.config.model_spec import ModelSpec
from shared.errors import Faults, InvalidRequest
from shared.job import State
from shared.job_record import Artifact, JobRecord, Progress

PREFIX = "/compat/fal"
FILES = f"{PREFIX}/storage/files"
PRIORITIES: Mapping[str, str] = {"high": "interactive", "normal": "standard", "low": "bulk"}
"""Priorities of jobs by the header `X-Fal-Queue-Priority`."""

JOB_FIELDS: Mapping[str, str] = {
    "num_images": "n",
    "num_inference_steps": "steps",
    "image_url": "image",
    "image_urls": "images",
    "mask_url": "mask",
    "end_image_url": "last_image",
    "video_url": "video",
    "face_video_url": "face_video",
    "audio_url": "audio",
    "duration": "duration_s",
    "num_frames": "frames",
    "frames_per_second": "fps",
}
"""Job fields by fal's names."""

EXCLUDED = ("model", "webhook", "webhook_events", "batch_id")
"""Job fields that are not allowed in the input."""

SIZES: Mapping[str, tuple[int, int]] = {
    "square_hd": (1024, 1024),
    "square": (512, 512),
    "portrait_4_3": (768, 1024),
    "portrait_16_9": (576, 1024),
    "landscape_4_3": (1024, 768),
    "landscape_16_9": (1024, 576),
}
_FILE_URL = re.compile(rf"https?://[^/]+(?:/[^?#]*)?{re.escape(FILES)}/(in_[0-9a-f]{{32}})")


class ImageSize(BaseModel):
    """`image_size` in pixels."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int
    height: int


class FalFields(BaseModel):
    """Input fields without an equal job field."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image_size: str | ImageSize | None = Field(None, description=f"Pixels, or one of {', '.join(SIZES)}.")
    loras: tuple[LoraWeight, ...] = ()
    enable_safety_checker: bool = Field(True, strict=True, description="False only for models without one.")
    sync_mode: Literal[False] = Field(False, description="Must be false: results are URLs.")
    expand_prompt: Literal[False] = Field(False, description="Must be false.")
    enable_prompt_expansion: Literal[False] = Field(False, description="Must be false.")
    acceleration: str | None = Field(None, max_length=32, description="Accepted and ignored.")
    safety_checker_version: str | None = Field(None, max_length=32, description="Accepted and ignored.")


def parse_input(body: Any, spec: ModelSpec, defaults: Mapping[str, Any]) -> tuple[JobRequest, FieldNames]:
    """Return the job request of an input, and its field names for later errors.

    `defaults` are job fields that the input can override. Raises `InvalidRequest` with all invalid fields.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("body: it must be a JSON object", param=None)
    values, faults = {name: value for name, value in body.items() if value is not None}, Faults()
    for name in EXCLUDED:
        if values.pop(name, None) is not None:
            faults.found.append(InvalidRequest(f"{name}: there is no such field", param=name))
    own = {name: values.pop(name) for name in FalFields.model_fields if name in values}
    fields = valid_fields(FalFields, own, faults)
    names: dict[str, str] = {}
    request: dict[str, Any] = {}
    for name, value in values.items():
        field = JOB_FIELDS.get(name, name)
        if field in request:
            faults.found.append(InvalidRequest(f"{name}: send either {names[field]} or {name}", param=name))
        else:
            names[field], request[field] = name, _image_value(value) if field in _IMAGES else value
    converted = _converted(fields, request, spec, faults)
    sources = {"width": "image_size", "height": "image_size", "adapters": "loras"}
    names |= {field: sources[field] for field in converted}
    parts = {"loras": {"id": "path", "url": "path", "hub": "path"}}
    renaming = FieldNames(names, prefix="", scalars=("image_size",), kept=(*EXCLUDED, "input"), parts=parts)
    with renaming.in_errors():
        body = {**defaults, **request, **converted, "model": spec.id}
        job_request, task = parse_checked(body, lambda _: spec, faults)
        check_single(job_request, task)
    return job_request, renaming


_IMAGES = ("image", "images", "mask", "last_image", "video", "face_video", "audio")


def _image_value(value: Any) -> Any:
    """Return images as job fields: uploaded files by their input ids."""
    if isinstance(value, list):
        return [_image_value(item) for item in value]
    match = _FILE_URL.fullmatch(value[:4096]) if isinstance(value, str) else None
    return match[1] if match else value


def _converted(fields: FalFields, request: Mapping[str, Any], spec: ModelSpec, faults: Faults) -> dict[str, Any]:
    """Return the job fields of fal's own fields, and collect the faults of these."""
    if not fields.enable_safety_checker and spec.safety_checker:
        message = f"enable_safety_checker: only the operator can disable that of model {spec.id!r}"
        faults.found.append(InvalidRequest(message, param="enable_safety_checker"))
    job: dict[str, Any] = {}
    if fields.image_size is not None and {"width", "height"} & request.keys():
        message = "image_size: send either image_size or width and height"
        faults.found.append(InvalidRequest(message, param="image_size"))
    elif fields.image_size is not None:
        with faults.collected():
            job |= _size(fields.image_size)
    if fields.loras and "adapters" in request:
        faults.found.append(InvalidRequest("loras: send either loras or adapters", param="loras"))
    elif fields.loras:
        job["adapters"] = adapters_of(fields.loras, spec)
    return job


def _size(size: str | ImageSize) -> dict[str, int]:
    if isinstance(size, ImageSize):
        return {"width": size.width, "height": size.height}
    if size not in SIZES:
        raise InvalidRequest(f"image_size: {size[:32]}: it must be one of {', '.join(SIZES)}", param="image_size")
    width, height = SIZES[size]
    return {"width": width, "height": height}


def request_urls(record: JobRecord, base_url: str) -> dict[str, str]:
    """Return the id and URLs of a queue request."""
    url = f"{base_url}{PREFIX}/{'/'.join(owner_and_name(record.job.model))}/requests/{record.job.id}"
    return {
        "request_id": record.job.id,
        "response_url": url,
        "status_url": f"{url}/status",
        "cancel_url": f"{url}/cancel",
    }


def status_object(
    record: JobRecord, base_url: str, *, position: int | None = None, with_logs: bool = False
) -> dict[str, Any]:
    """Return the status of a queue request. A job that failed is `COMPLETED` with an error, as its result is."""
    urls, state = request_urls(record, base_url), record.state
    if state is State.QUEUED:
        return {"status": "IN_QUEUE", "queue_position": position or 0, **urls}
    lines = log_lines(record, record.progress) if with_logs else None
    if state is State.RUNNING:
        return {"status": "IN_PROGRESS", "logs": lines, **urls}
    inference_ms = record.timings.inference_ms
    status = {
        "status": "COMPLETED",
        "logs": lines,
        "metrics": {} if inference_ms is None else {"inference_time": inference_ms / 1000},
        **urls,
    }
    if state is not State.SUCCEEDED:
        code, message = failure_of(record)
        status |= {"error": message, "error_type": code}
    return status


def failure_of(record: JobRecord) -> tuple[str, str]:
    """Return the code and message of a job that ended without a result."""
    if record.error is not None:
        return record.error.code, record.error.message
    if record.state is State.CANCELED:
        return "job_canceled", "the request was canceled"
    return "deadline_exceeded", "the deadline of the request passed"


def log_lines(record: JobRecord, progress: Progress) -> list[dict[str, str]]:
    """Return the seed, the progress and the warnings as log lines."""
    at = iso(record.finished_at_ms or record.started_at_ms or record.job.created_at_ms) or ""
    lines = logs(record, progress).splitlines()
    return [{"timestamp": at, "level": "INFO", "source": "USER", "message": line} for line in lines]


def result_object(record: JobRecord, url_of: Callable[[Artifact], str]) -> dict[str, Any]:
    """Return the result of a job that succeeded, with the URLs of its images, its video or its sound."""
    job, inference_ms = record.job, record.timings.inference_ms
    files = [
        {
            "url": url_of(artifact),
            "content_type": artifact.content_type,
            "file_name": artifact.key.rpartition("/")[2],
            "file_size": artifact.bytes,
            **({} if artifact.kind == "audio" else {"width": artifact.width, "height": artifact.height}),
        }
        for artifact in record.artifacts
    ]
    outputs: dict[str, Any] = {"video": files[0]} if job.task.makes_video else {"images": files}
    if job.task.makes_audio:
        outputs = {"audio": files[0]}
    return {
        **outputs,
        "seed": job.seed,
        "prompt": job.prompt,
        "has_nsfw_concepts": [artifact.flagged for artifact in record.artifacts],
        "timings": {} if inference_ms is None else {"inference": inference_ms / 1000},
    }
