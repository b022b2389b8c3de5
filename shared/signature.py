"""Which jobs are claimed together."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from shared.job import SHARED, Job, sharing
from shared.mixing import FIELDS, size_class

_SHARED_FIELDS = tuple(sorted(name for name in Job.model_fields if sharing(name) is SHARED))


def signature(job: Job) -> str:
    """Return the compatibility signature: equal for two jobs exactly when all their shared fields are, but for those
    that their model's forward can mix.

    It reads `model:widthxheightxframes:digest`, or `~sidexside` for a class of sizes that mix, so that an operator sees
    what waits; the digest covers every shared field, those not spelled out too. The signature routes; whether two
    jobs fuse is decided by their tensors.
    """
    values = _values(job)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return f"{job.model}:{shape(job)}x{job.frames}:{digest[:12]}"


def differences(one: Job, other: Job) -> tuple[str, ...]:
    """Return the fields of `Job` that keep two jobs out of one forward; `shape` stands for the size.

    Where it is the model, the others follow from it and are not told.
    """
    if one.model != other.model:
        return ("model",)
    mine, theirs = _values(one), _values(other)
    names = (mine.keys() | theirs.keys()) - {"width", "height"}  # told as the shape
    return tuple(sorted(name for name in names if mine.get(name) != theirs.get(name)))


def _values(job: Job) -> dict[str, Any]:
    """Return what the signature is made of."""
    mixed = frozenset[str]().union(*(FIELDS[field] for field in job.mixed_fields))
    return job.model_dump(mode="json", include=set(_SHARED_FIELDS) - mixed) | {"shape": shape(job)}


def shape(job: Job) -> str:
    """Return `widthxheight` of a job's pictures, or `~sidexside` of their class where their model mixes sizes."""
    if "size" in job.mixed_fields:
        side = size_class(job.width, job.height)
        return f"~{side}x{side}"
    return f"{job.width}x{job.height}"
