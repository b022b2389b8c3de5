"""OpenAI's requests for videos as ours, and our video jobs as its videos."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from shared.config.models_file import Catalog, ModelSpec
from shared.errors import InvalidRequest
from shared.job import Job, JobRecord, State, Task
from shared.protocols.openai.images import image_reference, set_size
from shared.request import JobRequest, check, parse, validated

MAX_SECONDS = 600.0
_STATUS = {State.QUEUED: "queued", State.RUNNING: "in_progress", State.SUCCEEDED: "completed"}
_MISSING = {
    State.CANCELED: ("video_canceled", "the job was canceled"),
    State.EXPIRED: ("video_expired", "the job's deadline passed before its turn came"),
    State.FAILED: ("video_failed", "the job failed"),
}


class VideoFields(BaseModel):
    """What OpenAI's bodies for videos hold beside the fields of a job, which may stand at the top level too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: Annotated[str | None, Field(description="`WxH` in pixels; unset: the model's own.")] = None
    seconds: Annotated[
        float | None, Field(gt=0, le=MAX_SECONDS, description="Length; brought to the nearest one the model can make.")
    ] = None
    num_frames: Annotated[int | None, Field(strict=True, ge=1, description="As `frames`.")] = None
    user: Annotated[str | None, Field(max_length=512, description="Taken, and not kept.")] = None


def parse_video_request(body: Any, catalog: Catalog) -> JobRequest:
    """Return the job that a decoded body of `/v1/videos` asks for, or raise `InvalidRequest` that names a field.

    Without a `model` the catalog's first one that makes videos is meant.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("body: it must be a JSON object")
    sent = {name: value for name, value in body.items() if value is not None}
    fields = validated(VideoFields, {name: sent.pop(name) for name in VideoFields.model_fields if name in sent})
    for name in ("lora", "loras"):
        if isinstance(sent.get(name), list):
            choices = sent.pop(name)
            sent.setdefault("adapters", [{"id": one} if isinstance(one, str) else one for one in choices])
    if "input_reference" in sent:
        sent["image"] = image_reference(sent.pop("input_reference"))
    if "model" not in sent:
        sent["model"] = _first(catalog).id
    sent.setdefault("task", (Task.IMAGE_TO_VIDEO if "image" in sent else Task.TEXT_TO_VIDEO).value)
    set_size(sent, fields.size)
    if fields.num_frames is not None:
        sent["frames"] = fields.num_frames
    request = parse(sent)
    spec = catalog.get(request.model)
    if fields.seconds is not None:
        request = request.model_copy(update={"frames": _frames(fields.seconds, request, spec)})
    _check(request, spec, fields)
    return request


def _first(catalog: Catalog) -> ModelSpec:
    for spec in catalog:
        if any(task.makes_video for task in spec.tasks):
            return spec
    raise InvalidRequest("model: none of the models here makes videos", param="model")


def _frames(seconds: float, request: JobRequest, spec: ModelSpec) -> int:
    """Return how many frames come nearest to `seconds`, as the model makes them."""
    if request.frames is not None:
        raise InvalidRequest("seconds: send either seconds or frames", param="seconds")
    fps, limits = request.fps or spec.defaults.fps, spec.limits
    if seconds * fps > limits.most_frames + limits.frames_multiple:
        longest = limits.most_frames / fps
        raise InvalidRequest(
            f"seconds: model {spec.id!r} makes at most {longest:.2f} of them at {fps} frames a second", param="seconds"
        )
    frames = max(0, round((seconds * fps - 1) / limits.frames_multiple)) * limits.frames_multiple + 1
    return min(frames, limits.most_frames)


def _check(request: JobRequest, spec: ModelSpec, fields: VideoFields) -> None:
    if request.n != 1:
        raise InvalidRequest("n: a video is made by itself; ask again for another", param="n")
    if request.task is None or not request.task.makes_video:
        raise InvalidRequest("task: it must make a video", param="task")
    try:
        check(request, spec)
    except InvalidRequest as error:
        if fields.size is not None and error.param in ("width", "height"):
            raise InvalidRequest(f"size: {error.message}", param="size") from None
        raise


def video_id(job_id: str) -> str:
    """Return a video's id: that of its job under another name."""
    return "video_" + job_id.removeprefix("job_")


def video_job_id(video: str) -> str:
    """Return the id of the job that makes a video; what is no video's id becomes no job's."""
    return "job_" + video.removeprefix("video_") if video.startswith("video_") else ""


def video_object(record: JobRecord) -> dict[str, Any]:
    """Return a video job as OpenAI's SDKs read it: any status but theirs would end their polling as if it were done."""
    job, status = record.job, _STATUS.get(record.state, "failed")
    return {
        "id": video_id(job.id),
        "object": "video",
        "model": job.model,
        "status": status,
        "progress": 100 if status == "completed" else min(99, record.progress.percent),
        "created_at": job.created_at_ms // 1000,
        "completed_at": _seconds(record.finished_at_ms) if status == "completed" else None,
        "expires_at": _seconds(record.expires_at_ms),
        "prompt": job.prompt,
        "seconds": _length(job),
        "size": f"{job.width}x{job.height}",
        "seed": job.seed,
        "remixed_from_video_id": None,
        "error": _error(record) if status == "failed" else None,
    }


def _length(job: Job) -> str:
    return f"{job.frames / (job.fps or 1):.2f}".rstrip("0").rstrip(".")


def _seconds(at_ms: int | None) -> int | None:
    return None if at_ms is None else at_ms // 1000


def _error(record: JobRecord) -> dict[str, Any]:
    code, message = _MISSING[record.state]
    if record.error is not None:
        return {"code": record.error.code, "message": record.error.message, "param": record.error.param}
    return {"code": code, "message": message, "param": None}
