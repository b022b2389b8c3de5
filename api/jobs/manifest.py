"""Rows of a manifest: what a job was asked for, what it made, and with what, to make the same again."""

from collections.abc import Sequence
from typing import Any

from api.jobs.request import JobRequest
from shared.job import Job
from shared.job_record import JobRecord

MADE_WITH = (
    *("model", "seed", "width", "height", "frames", "fps", "steps", "guidance_scale", "scheduler", "strength"),
    *("guidance_scale_2", "scheduler_options", "step_cache", "refiner_start", "layers", "duration_s", "best_of"),
)
"""Fields that the service chooses where a request leaves them out."""

_INPUTS = ("image", "mask", "last_image", "video", "face_video", "audio")
_REQUESTED = {*JobRequest.model_fields} & {*Job.model_fields} - {
    *(*MADE_WITH, *_INPUTS, "images", "controls", "output", "webhook")
}


def manifest_row(record: JobRecord, files: Sequence[str]) -> dict[str, Any]:
    """Return the row of a job that has succeeded, in the form of the manifest of a backfill.

    Inputs are named by their ids, as a request names them; a destination and a webhook are left out.
    """
    job = record.job
    unused = _unused(job)
    made = job.model_dump(mode="json", include={*MADE_WITH} - unused, exclude_defaults=True)
    return {
        **job.model_dump(mode="json", include=_REQUESTED - unused, exclude_defaults=True),
        **_inputs(job),
        "state": "done",
        "job": job.id,
        "files": list(files),
        "flagged": [artifact.index for artifact in record.artifacts if artifact.flagged],
        "made": {name: made[name] for name in MADE_WITH if name in made} | {"device_seconds": record.device_seconds},
        "error": None,
    }


def _unused(job: Job) -> set[str]:
    """Return the fields that a job has and its request may not have."""
    sizes = {"width", "height"} if job.task.makes_audio else set()
    return sizes if job.best_of is None else {*sizes, "n"}


def _inputs(job: Job) -> dict[str, Any]:
    """Return the inputs of a job by their fields in a request."""
    ids = {path: ref.id for path, ref in job.inputs.items()}
    images = [image.id for image in job.images] if len(job.images) > 1 else []
    controls = [
        control.model_dump(mode="json", exclude={"kind"}) | {"image": ids[f"controls.{at}.image"]}
        for at, control in enumerate(job.controls)
    ]
    several = {name: values for name, values in (("images", images), ("controls", controls)) if values}
    return {name: ids[name] for name in _INPUTS if name in ids} | several
