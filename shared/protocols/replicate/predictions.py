"""Jobs as Replicate's predictions."""

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
    """Return a job as a prediction; `outputs` are the URLs of its images, in order.

    `state` is the state at a webhook event; default: the current one. An expired job is `failed`, the only status on
    which clients raise.
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
    """Return the input of a job with all defaults resolved, so that it can be sent again."""
    values: dict[str, Any] = {
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
        values["adapters"] = [adapter.model_dump() for adapter in job.adapters]
    if job.task.makes_video:
        values |= {"num_frames": job.frames, "fps": job.fps}
    if job.layers:
        values["layers"] = job.layers
    if len(job.images) > 1:
        values["images"] = [ref.id for ref in job.images]
    elif job.images:
        values["image"] = job.images[0].id
    values |= {name: ref.id for name, ref in (("mask", job.mask), ("last_image", job.last_image)) if ref is not None}
    return {name: value for name, value in values.items() if value is not None}


def logs(job: Job, progress: Progress) -> str:
    """Return the seed and a tqdm line, from which clients read the progress."""
    seed = f"Using seed: {job.seed}\n"
    return seed + (f"{progress_line(progress)}\n" if progress.total else "")


def progress_line(progress: Progress) -> str:
    """Return a line such as ` 50%|##########          | 6/12`."""
    percent = min(100, progress.percent)
    return f"{percent:3d}%|{'#' * (_BAR * percent // 100):<{_BAR}}| {progress.step}/{progress.total}"


def webhook_body(record: JobRecord, version: str, event: str, base_url: str) -> bytes:
    """Return the body of a webhook: the prediction at the event, with URLs; without its input above 20 kB."""
    urls = [f"{base_url}/v1/jobs/{record.job.id}/artifacts/{artifact.index}" for artifact in record.artifacts]
    body = prediction(record, base_url, version, outputs=urls, state=State(event.partition(".")[2]))
    encoded = _encode(body)
    return encoded if len(encoded) <= MAX_BODY_BYTES else _encode({**body, "input": {}})


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def _output(job: Job, outputs: Sequence[str]) -> Any:
    return next(iter(outputs), None) if job.task.makes_video else list(outputs)


def _error(record: JobRecord) -> str:
    if record.error is not None:
        return record.error.message[:_MAX_ERROR_CHARS]
    return "the deadline passed" if record.state is State.EXPIRED else "the job failed"


def _metrics(record: JobRecord) -> dict[str, float]:
    """Return times in seconds; `predict_time` is the time of inference."""
    ended_ms, started_ms = record.finished_at_ms, record.started_at_ms
    metrics: dict[str, float] = {}
    if ended_ms is not None:
        metrics["total_time"] = (ended_ms - record.job.created_at_ms) / 1000
    if record.timings.inference_ms is not None:
        metrics["predict_time"] = record.timings.inference_ms / 1000
    elif ended_ms is not None and started_ms is not None:
        metrics["predict_time"] = (ended_ms - started_ms) / 1000
    return metrics
