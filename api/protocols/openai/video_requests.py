"""OpenAI video requests as job requests, and video jobs as OpenAI videos. Pure functions."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from api.jobs.request import JobRequest
from api.protocols.openai.image_requests import image_reference, parse_sized, split_fields
from api.protocols.openai.server_fields import Warnings
from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.errors import Faults, InvalidRequest
from shared.job import State
from shared.job_fields import MAX_FPS, Count
from shared.job_record import FieldWarning, JobRecord
from shared.runtime.clock import epoch_s
from shared.tasks import Task

_STATUS = {State.QUEUED: "queued", State.RUNNING: "in_progress", State.SUCCEEDED: "completed"}
_DEFAULT_ERRORS = {
    State.CANCELED: ("video_canceled", "the job was canceled"),
    State.EXPIRED: ("video_expired", "the job did not start before its deadline"),
    State.FAILED: ("video_failed", "the job failed"),
}


class VideoFields(BaseModel):
    """OpenAI's own fields of a video request; job fields are allowed at the top level too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: str | None = Field(None, description="`WxH` in pixels; default: the model's.")
    seconds: float | None = Field(None, gt=0, le=600, description="Length; rounded to the nearest the model supports.")
    num_frames: Count | None = Field(None, description="As `frames`; rounded to the nearest the model supports.")
    user: str | None = Field(None, max_length=512, description="Accepted and not stored.")


@dataclass(frozen=True)
class VideoRequest:
    """Parsed video request."""

    request: JobRequest
    warnings: Warnings


def parse_video_request(body: Any, catalog: Catalog) -> VideoRequest:
    """Parse the body of `/v1/videos`; raises `InvalidRequest` with all invalid fields.

    Default model: the first of the catalog that makes videos from what the request has.
    """
    faults = Faults()
    fields, values, warnings = split_fields(body, VideoFields, faults)
    if {"image", "input_reference"} <= values.keys():
        message = "input_reference: send either input_reference or image"
        faults.found.append(InvalidRequest(message, param="input_reference"))
    if "input_reference" in values:
        values["image"] = image_reference(values.pop("input_reference"))
    if "video" not in values:
        values.setdefault("task", (Task.IMAGE_TO_VIDEO if "image" in values else Task.TEXT_TO_VIDEO).value)
    if "model" not in values:
        values["model"] = _default_model(values.get("task"), catalog)
    if isinstance(values.get("n"), int) and values["n"] > 1:
        message = f"n: a video request makes one video: {values['n']}; send several requests"
        faults.found.append(InvalidRequest(message, param="n"))
    spec = catalog.find(values["model"])
    if spec is not None:
        with faults.collected():
            warnings += _set_frames(values, fields, spec)
    request, task = parse_sized(values, fields.size, catalog, faults)
    if not task.makes_video:
        raise InvalidRequest("task: it must make a video", param="task")
    return VideoRequest(request, warnings)


def _default_model(task: object, catalog: Catalog) -> str:
    """Return the first model that does a task, or without one takes a video; else the first that makes videos."""
    makers = [spec for spec in catalog if any(one.makes_video for one in spec.tasks)]
    if not makers:
        raise InvalidRequest("model: no configured model makes videos", param="model")
    fitting = (one.id for one in makers if (task in one.tasks if task else any(each.takes_video for each in one.tasks)))
    return next(fitting, makers[0].id)


def _set_frames(values: dict[str, Any], fields: VideoFields, spec: ModelSpec) -> Warnings:
    """Set `frames` from `num_frames` or `seconds`, and return the warning about a rounded number."""
    if fields.num_frames is not None:
        if "frames" in values:
            raise InvalidRequest("num_frames: send either num_frames or frames", param="num_frames")
        values["frames"] = _nearest_frames(fields.num_frames, spec)
    if fields.seconds is not None:
        if "frames" in values:
            raise InvalidRequest("seconds: send either seconds or frames", param="seconds")
        if "video" in values and values.get("fps") is None:  # else its own rate, which is not known yet
            values["fps"] = spec.defaults.fps
        values["frames"] = _frames(fields.seconds, values.get("fps"), spec)
    return () if fields.num_frames is None else _rounded(fields.num_frames, values["frames"])


def _frames(seconds: float, sent_fps: object, spec: ModelSpec) -> int:
    """Return the supported number of frames that is nearest to `seconds`."""
    fps, limits = sent_fps if isinstance(sent_fps, int) and 0 < sent_fps <= MAX_FPS else spec.defaults.fps, spec.limits
    if seconds * fps > limits.most_frames + limits.frames_multiple:
        longest = limits.most_frames / fps
        raise InvalidRequest(f"seconds: model {spec.id!r} makes at most {longest:.2f} at {fps} fps", param="seconds")
    if seconds * fps < limits.min_frames - limits.frames_multiple:
        shortest = limits.min_frames / fps
        raise InvalidRequest(f"seconds: model {spec.id!r} makes at least {shortest:.2f} at {fps} fps", param="seconds")
    return min(max(_nearest_frames(seconds * fps, spec), limits.min_frames), limits.most_frames)


def _nearest_frames(frames: float, spec: ModelSpec) -> int:
    """Return the number of frames nearest to `frames` that the model can make, whatever its limit."""
    multiple = spec.limits.frames_multiple
    return max(0, round((frames - 1) / multiple)) * multiple + 1


def _rounded(sent: int, frames: int) -> Warnings:
    """Return a warning if the model makes another number of frames than `sent`: other servers round as well."""
    if sent == frames:
        return ()
    return (FieldWarning(param="num_frames", message=f"num_frames: {frames} instead of {sent}, which the model needs"),)


def video_id(job_id: str) -> str:
    """Return the video id of a job: the job id with another prefix."""
    return "video_" + job_id.removeprefix("job_")


def video_job_id(video: str) -> str:
    """Return the job id of a video; empty for an id without the prefix `video_`."""
    return "job_" + video.removeprefix("video_") if video.startswith("video_") else ""


def video_object(record: JobRecord) -> dict[str, Any]:
    """Return a video job as OpenAI's SDKs read it; they treat a status unknown to them as completed."""
    job, status = record.job, _STATUS.get(record.state, "failed")
    return {
        "id": video_id(job.id),
        "object": "video",
        "model": job.model,
        "status": status,
        "progress": 100 if status == "completed" else min(99, record.progress.percent),
        "created_at": job.created_at_ms // 1000,
        "completed_at": epoch_s(record.finished_at_ms) if status == "completed" else None,
        "expires_at": epoch_s(record.expires_at_ms),
        "prompt": job.prompt,
        "seconds": f"{job.frames / (job.fps or 1):.2f}".rstrip("0").rstrip("."),
        "size": f"{job.width}x{job.height}",
        "seed": job.seed,
        "remixed_from_video_id": None,
        "error": _error(record) if status == "failed" else None,
        "warnings": [warning.model_dump() for warning in record.warnings],
    }


def _error(record: JobRecord) -> dict[str, Any]:
    code, message = _DEFAULT_ERRORS[record.state]
    error = record.error
    if error is None or record.state is State.EXPIRED:
        return {"code": code, "message": message if error is None else error.message, "param": None}
    return error.model_dump(mode="json", include={"code", "message", "param"})
