"""The video of one request: what a model allows of it, and how many frames of it the job uses."""

from collections.abc import Iterator
from typing import Any

from api.jobs.request import JobRequest
from shared.config.model_spec import ModelSpec
from shared.errors import Faults, InvalidRequest
from shared.inputs.video_timing import frames_at, usual_fps
from shared.job import InputRef, Job
from shared.tasks import Task


def fields_of_video(video: InputRef, job: Job, request: JobRequest, spec: ModelSpec) -> dict[str, Any]:
    """Return the frames and the rate of a job that starts from a video, or raise `InvalidRequest`.

    A request leaves both to the video: its own rate, and as many frames of it as the model makes at most. One that is
    extended has the model's frames.
    """
    faults = Faults()
    faults.found += _faults(video, "video", spec)
    faults.check()
    video_fps = video.fps or 1.0
    fps = usual_fps(video_fps) if request.fps is None else request.fps
    usable = frames_at(video.frames, video_fps, fps)
    if job.task is Task.EXTEND_VIDEO:
        return {"frames": _frames_with_more(usable, job, request, spec), "fps": fps}
    frames = spec.limits.most_frames_of(usable) if request.frames is None else job.frames
    if frames < (least := spec.limits.min_frames):
        message = f"video: it has {usable} frames at {fps} fps; model {spec.id!r} makes at least {least}"
        raise InvalidRequest(message, param="video")
    if frames > usable:
        raise InvalidRequest(f"frames is at most {usable}, as the video has no more at {fps} fps", param="frames")
    return {"frames": frames, "fps": fps}


def _frames_with_more(usable: int, job: Job, request: JobRequest, spec: ModelSpec) -> int:
    """Return the frames of a result that begins with `usable` ones: without a choice more than the default, if that
    is too few. Raises `InvalidRequest` if they are not more than that."""
    most = spec.limits.most_frames_of(spec.limits.max_frames)
    frames = most if request.frames is None and job.frames <= usable else job.frames
    if frames > usable:
        return frames
    if request.frames is not None and most > usable:
        raise InvalidRequest(
            f"frames is those of the whole result: more than the {usable} of the video", param="frames"
        )
    message = f"video: it has {usable} frames at the job's rate; model {spec.id!r} makes at most {most} with them"
    raise InvalidRequest(message, param="video")


def check_face_video(faces: InputRef, job: Job, spec: ModelSpec) -> None:
    """Raise `InvalidRequest` for a video of faces that the model does not allow, or that is shorter than the job."""
    faults = Faults()
    faults.found += _faults(faces, "face_video", spec)
    usable = frames_at(faces.frames, faces.fps or 1.0, job.fps or 1)
    if usable < job.frames:
        message = f"face_video: it has {usable} frames at {job.fps} fps, fewer than the {job.frames} of the job"
        faults.found.append(InvalidRequest(message, param="face_video"))
    faults.check()


def _faults(video: InputRef, param: str, spec: ModelSpec) -> Iterator[InvalidRequest]:
    limits = spec.limits
    hidden = f", {video.hidden_frames} of them hidden by its edit list" if video.hidden_frames else ""
    amounts = (
        (f"frames{hidden}", video.frames + video.hidden_frames, limits.max_input_frames),
        ("pixels in a frame", video.width * video.height, limits.max_input_video_pixels),
        ("bytes", video.bytes, limits.max_input_video_bytes),
    )
    for unit, amount, most in amounts:
        if most is not None and amount > most:
            message = f"{param}: it has {amount} {unit}; model {spec.id!r} takes at most {most}"
            yield InvalidRequest(message, param=param)
