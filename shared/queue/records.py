"""A job's hash in Redis, read as a `JobRecord`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from shared.job import Artifact, BatchingStats, Failure, JobRecord, Outcome, Phase, Progress, State, Timings, decode

Part = TypeVar("Part", bound=BaseModel)
_ARTIFACTS = TypeAdapter(tuple[Artifact, ...])


def record(fields: Mapping[str, str]) -> JobRecord | None:
    """Return what a job's hash tells; None when there is none, or when it cannot be read as one of ours."""
    if "job" not in fields:
        return None
    try:
        return _record(fields)
    except ValidationError:
        return None


def paired(flat: Sequence[str]) -> dict[str, str]:
    """Return the fields of a hash that a script answered as a flat list."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def outcome_fields(outcome: Outcome) -> list[str]:
    """Return an outcome as the settle script takes it: state, artifacts, error, fusing, timings, GPU-seconds, steps."""
    return [
        outcome.state.value,
        _ARTIFACTS.dump_json(outcome.artifacts).decode(),
        "" if outcome.error is None else outcome.error.model_dump_json(),
        outcome.batching.model_dump_json(),
        outcome.timings.model_dump_json(),
        repr(outcome.gpu_seconds),
        str(outcome.progress.step),
        str(outcome.progress.total),
    ]


def _record(fields: Mapping[str, str]) -> JobRecord:
    return JobRecord(
        job=decode(fields["job"]),
        state=State(fields["state"]),
        phase=Phase(fields["phase"]) if fields.get("phase") else None,
        progress=Progress(step=int(fields.get("step", 0)), total=int(fields.get("total", 0))),
        attempts=int(fields.get("attempts", 0)),
        losses=int(fields.get("losses", 0)),
        epoch=int(fields.get("epoch", 0)),
        worker=fields.get("worker"),
        cancel_requested="cancel" in fields,
        started_at_ms=_number(fields, "started"),
        finished_at_ms=_number(fields, "finished"),
        expires_at_ms=_number(fields, "expires"),
        artifacts=_ARTIFACTS.validate_json(fields.get("artifacts", "[]")),
        error=_part(Failure, fields.get("error")),
        batching=_part(BatchingStats, fields.get("fusing")),
        timings=_part(Timings, fields.get("timings")) or Timings(),
        event_id=fields.get("event", "0-0"),
    )


def _number(fields: Mapping[str, str], name: str) -> int | None:
    return int(fields[name]) if name in fields else None


def _part(kind: type[Part], wire: str | None) -> Part | None:
    return None if wire is None else kind.model_validate_json(wire)
