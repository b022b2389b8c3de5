"""Which jobs are claimed together."""

from __future__ import annotations

import hashlib
import json

from shared.job import SHARED, Job, sharing

_SHARED_FIELDS = tuple(sorted(name for name in Job.model_fields if sharing(name) is SHARED))


def signature(job: Job) -> str:
    """Return the compatibility signature: equal for two jobs exactly when all their shared fields are, but for those
    that their model's forward can mix.

    It reads `model:widthxheightxframes:digest`, so that an operator sees what waits; the digest covers every
    shared field, those not spelled out too. The signature routes; whether two jobs fuse is decided by their
    tensors.
    """
    values = job.model_dump(mode="json", include=set(_SHARED_FIELDS).difference(job.mixes))
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return f"{job.model}:{job.width}x{job.height}x{job.frames}:{digest[:12]}"
