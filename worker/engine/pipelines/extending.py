"""Videos that go on from one that a job gives: what pipelines that keep some frames get of it."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from PIL import Image

from shared.inputs.video_timing import frames_at
from shared.job import Job
from shared.job_record import FieldWarning
from shared.tasks import Task
from worker.engine.pipelines.clones import Pipeline

Parameters = Mapping[str, inspect.Parameter]

_MASKED = frozenset({"video", "mask", "reference_images"})  # of a call that makes the masked frames anew, as VACE's
_UNKNOWN = (128, 128, 128)  # frames to make, as the authors of VACE give them
_KEPT, _MADE = 0, 255


def extends(accepted: Parameters) -> bool:
    """Return whether a call can keep the first frames of a video, and make the rest."""
    return "conditions" in accepted or accepted.keys() >= _MASKED


def beginning(pipeline: Pipeline, job: Job, accepted: Parameters, video: tuple[Image.Image, ...]) -> dict[str, Any]:
    """Return the arguments that name the frames of a video from which the result goes on."""
    if job.task is not Task.EXTEND_VIDEO:
        return {}
    if "conditions" in accepted:
        return {"conditions": [_condition(pipeline, list(video))], "video": None}
    made, size = job.frames - len(video), (job.width, job.height)
    unknown, kept, masked = Image.new("RGB", size, _UNKNOWN), Image.new("L", size, _KEPT), Image.new("L", size, _MADE)
    return {"video": [*video, *(unknown,) * made], "mask": [*(kept,) * len(video), *(masked,) * made]}


def _condition(pipeline: Pipeline, frames: list[Image.Image]) -> Any:
    """Return frames to keep in the class of LTX-Video or LTX-2, which is in the module of its pipeline."""
    module = vars(sys.modules[type(pipeline).__module__])
    if "LTXVideoCondition" in module:
        return module["LTXVideoCondition"](video=frames)
    return module["LTX2VideoCondition"](frames=frames)


def unused_frames(pipeline: Pipeline, job: Job) -> tuple[FieldWarning, ...]:
    """Return a warning about frames at the end of the video that fill no group: pipelines with conditions drop them."""
    if job.task is not Task.EXTEND_VIDEO or job.video is None or job.fps is None:
        return ()
    given = frames_at(job.video.frames, job.video.fps or 1.0, job.fps)
    rest = (given - 1) % getattr(pipeline, "vae_temporal_compression_ratio", 1)
    message = f"video: the result goes on from frame {given - rest} of {given}; the model keeps whole groups of frames"
    return (FieldWarning(param="video", message=message),) if rest else ()
