"""Model names of Replicate's clients, `owner/name` and a version, and jobs as predictions."""

import hashlib
from collections.abc import Sequence
from typing import Any

from api.jobs.job_object import iso
from api.protocols.job_logs import logs
from api.protocols.model_names import find_model, owner_and_name
from api.protocols.replicate.prediction_inputs import EXCLUDED, REPLICATE_NAMES
from api.webhook_messages import MAX_BODY_BYTES, encode
from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.errors import InvalidRequest, UnknownModel
from shared.job import InputRef, Job, State
from shared.job_fields import SENT_FIELDS, ChosenFields
from shared.job_record import JobRecord
from shared.tasks import Medium

_INPUT_FIELDS = frozenset((*SENT_FIELDS, *ChosenFields.model_fields)).difference(
    EXCLUDED,
    ("priority", "on_deadline", "metadata"),  # of no meaning to Replicate's clients
    ("step_cache",),  # not every model takes the schedule of a level
)
PREFIX = "/compat/replicate/v1"
_STATUS = {
    State.QUEUED: "starting",
    State.RUNNING: "processing",
    State.SUCCEEDED: "succeeded",
    State.CANCELED: "canceled",
}


def model_version(spec: ModelSpec) -> str:
    """Return the hash of a model's id, hub source, revision and variant, and the names of files of weights.

    The path of a folder is excluded, because it can differ between machines.
    """
    facts = (spec.id, "" if spec.is_folder else spec.source, spec.revision or "", spec.variant or "")
    return hashlib.sha256("\n".join((*facts, *spec.file_names)).encode()).hexdigest()


def model_of_version(version: str, catalog: Catalog) -> ModelSpec:
    """Return the model of a request's `version`: a version, `owner/name`, `owner/name:version` or a model id.

    Raises `InvalidRequest` for a version that is not served: other weights would be used silently.
    """
    name, colon, number = version.rpartition(":")
    if colon:
        spec = _by_name(name, catalog)
        if spec is not None and model_version(spec) == number:
            return spec
    else:
        match = next((spec for spec in catalog if model_version(spec) == version), None) or _by_name(version, catalog)
        if match is not None:
            return match
    raise InvalidRequest(f"version: not served: {version[:160]!r}; GET /v1/models lists the versions", param="version")


def _by_name(name: str, catalog: Catalog) -> ModelSpec | None:
    owner, slash, rest = name.partition("/")
    try:
        return find_model(owner, rest, catalog) if slash else catalog.get(name)
    except UnknownModel:
        return None


def prediction(
    record: JobRecord,
    base_url: str,
    version: str,
    *,
    outputs: Sequence[str] = (),
    state: State | None = None,
    stream_query: str = "",
) -> dict[str, Any]:
    """Return a job as a prediction; `outputs` are the URLs of its images, in order, `stream_query` signs its stream.

    `state` is the state at a webhook event; default: the current one. An expired job is `failed`, the only status on
    which clients raise.
    """
    job, state = record.job, state or record.state
    output = list(outputs) if job.task.medium is Medium.IMAGE else next(iter(outputs), None)
    get = f"{base_url}{PREFIX}/predictions/{job.id}"
    return {
        "id": job.id,
        "model": "/".join(owner_and_name(job.model)),
        "version": version,
        "status": _STATUS.get(state, "failed"),
        "input": input_of(job),
        "output": output if state is State.SUCCEEDED else None,
        "logs": logs(record, record.progress),
        "error": _error(record) if state in (State.FAILED, State.EXPIRED) else None,
        "metrics": _metrics(record) if state.terminal else {},
        "data_removed": False,
        "source": "api",
        "created_at": iso(job.created_at_ms),
        "started_at": None if state is State.QUEUED else iso(record.started_at_ms),
        "completed_at": iso(record.finished_at_ms) if state.terminal else None,
        "urls": {"get": get, "cancel": f"{get}/cancel", "stream": f"{get}/stream{stream_query}"},
    }


def input_of(job: Job) -> dict[str, Any]:
    """Return the input of a job with all defaults resolved, so that it can be sent again."""
    unused = {*(() if job.task.makes_video else ("frames", "fps")), *(() if job.layers else ("layers",))}
    unused |= {"width", "height"} if job.task.makes_audio else {"duration_s"}
    sent = job.model_dump(mode="json", include={*_INPUT_FIELDS} - unused)
    values: dict[str, Any] = {REPLICATE_NAMES.get(name, name): value for name, value in sent.items()}
    if job.adapters:
        values["adapters"] = [adapter.model_dump() for adapter in job.adapters]
    if len(job.images) > 1:
        values["images"] = [_sent(ref) for ref in job.images]
    elif job.images:
        values["image"] = _sent(job.images[0])
    names = ("mask", "last_image", "video", "face_video", "audio")
    values |= {name: _sent(ref) for name in names if (ref := getattr(job, name)) is not None}
    if job.controls:
        pairs = zip(job.controls, job.control_images, strict=True)
        values["controls"] = [{**control.model_dump(exclude={"kind"}), "image": _sent(ref)} for control, ref in pairs]
    return {name: value for name, value in values.items() if value is not None and value is not False}


def _sent(ref: InputRef) -> str | dict[str, Any]:
    """Return what names an input image in a request."""
    return ref.id if ref.source is None else ref.source.model_dump()


def webhook_body(record: JobRecord, version: str, event: str, base_url: str) -> bytes:
    """Return the body of a webhook: the prediction at the event, with URLs; without its input above 20 kB."""
    urls = [f"{base_url}/v1/jobs/{record.job.id}/artifacts/{artifact.index}" for artifact in record.artifacts]
    body = prediction(record, base_url, version, outputs=urls, state=State(event.partition(".")[2]))
    encoded = encode(body)
    return encoded if len(encoded) <= MAX_BODY_BYTES else encode({**body, "input": {}})


def _error(record: JobRecord) -> str:
    if record.error is not None:
        return record.error.message[:1_000]
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
