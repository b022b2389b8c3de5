"""Jobs as Replicate's clients read them: as predictions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shared.job import Job, JobRecord, Progress, State
from shared.protocols.native import iso
from shared.protocols.replicate.models import owner_and_name
from shared.webhooks import MAX_BODY_BYTES

PREFIX = "/compat/replicate/v1"
_STATUS = {
    State.QUEUED: "starting",
    State.RUNNING: "processing",
    State.SUCCEEDED: "succeeded",
    State.CANCELED: "canceled",
}
_BAR = 20
_MAX_ERROR_CHARS = 1_000


def prediction(
    record: JobRecord,
    base_url: str,
    version: str,
    *,
    outputs: Sequence[str] = (),
    state: State | None = None,
) -> dict[str, Any]:
    """Return a job as a prediction; `outputs` are where its pictures are, in order.

    `state` is what it was when an event was told of it, unset: what it is. A deadline that passed is a failure: clients
    know no other word for it that raises.
    """
    job, state = record.job, state or record.state
    succeeded = state is State.SUCCEEDED
    get = f"{base_url}{PREFIX}/predictions/{job.id}"
    return {
        "id": job.id,
        "model": "/".join(owner_and_name(job.model)),
        "version": version,
        "status": _STATUS.get(state, "failed"),
        "input": input_of(job),
        "output": _output(job, outputs) if succeeded else None,
        "logs": logs(job, record.progress),
        "error": _error(record) if state in (State.FAILED, State.EXPIRED) else None,
        "metrics": _metrics(record) if state.terminal else {},
        "data_removed": False,
        "source": "api",
        "created_at": iso(job.created_at_ms),
        "started_at": None if state is State.QUEUED else iso(record.started_at_ms),
        "completed_at": iso(record.finished_at_ms) if state.terminal else None,
        "urls": {"get": get, "cancel": f"{get}/cancel", "stream": f"{get}/stream"},
    }


def input_of(job: Job) -> dict[str, Any]:
    """Return the input of a job with every default resolved: sent again, it asks for the same."""
    told: dict[str, Any] = {
        "prompt": job.prompt,
        "negative_prompt": job.negative_prompt,
        "width": job.width,
        "height": job.height,
        "num_outputs": job.n,
        "num_inference_steps": job.steps,
        "guidance_scale": job.guidance_scale,
        "guidance_scale_2": job.guidance_scale_2,
        "seed": job.seed,
        "scheduler": job.scheduler,
        "prompt_strength": job.strength,
        "output_format": job.output_format.value,
        "output_quality": job.output_quality,
        "task": job.task.value,
    }
    if job.adapters:
        told["adapters"] = [adapter.model_dump() for adapter in job.adapters]
    if job.task.makes_video:
        told |= {"num_frames": job.frames, "fps": job.fps}
    if job.layers:
        told["layers"] = job.layers
    if len(job.images) > 1:
        told["images"] = [ref.id for ref in job.images]
    elif job.images:
        told["image"] = job.images[0].id
    told |= {name: ref.id for name, ref in (("mask", job.mask), ("last_image", job.last_image)) if ref is not None}
    return {name: value for name, value in told.items() if value is not None}


def logs(job: Job, progress: Progress) -> str:
    """Return the seed, and how far the job is as a line of tqdm: that is where clients read progress from."""
    seed = f"Using seed: {job.seed}\n"
    return seed + (f"{progress_line(progress)}\n" if progress.total else "")


def progress_line(progress: Progress) -> str:
    """Return a line such as ` 50%|##########          | 6/12`."""
    percent = min(100, progress.percent)
    return f"{percent:3d}%|{'#' * (_BAR * percent // 100):<{_BAR}}| {progress.step}/{progress.total}"


def webhook_body(record: JobRecord, version: str, event: str, base_url: str) -> bytes:
    """Return what a webhook is sent of an event of a job: the prediction as it was then, URLs and no pictures; under
    20 kB, without the input where that is long."""
    urls = [f"{base_url}/v1/jobs/{record.job.id}/artifacts/{artifact.index}" for artifact in record.artifacts]
    told = prediction(record, base_url, version, outputs=urls, state=State(event.partition(".")[2]))
    made = _encoded(told)
    return made if len(made) <= MAX_BODY_BYTES else _encoded({**told, "input": {}})


def _encoded(told: dict[str, Any]) -> bytes:
    return json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()


def _output(job: Job, outputs: Sequence[str]) -> Any:
    return next(iter(outputs), None) if job.task.makes_video else list(outputs)


def _error(record: JobRecord) -> str:
    if record.error is not None:
        return record.error.message[:_MAX_ERROR_CHARS]
    return "the deadline passed" if record.state is State.EXPIRED else "the job failed"


def _metrics(record: JobRecord) -> dict[str, float]:
    """Return seconds; `predict_time` is what the job was worked on for."""
    ended, began = record.finished_at_ms, record.started_at_ms
    told: dict[str, float] = {}
    if ended is not None:
        told["total_time"] = (ended - record.job.created_at_ms) / 1000
    if record.timings.inference_ms is not None:
        told["predict_time"] = record.timings.inference_ms / 1000
    elif ended is not None and began is not None:
        told["predict_time"] = (ended - began) / 1000
    return told
