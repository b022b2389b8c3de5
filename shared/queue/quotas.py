"""Quotas of tenants: the sizes that count, the error when one is used up, and when a full queue has room."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

from shared.errors import QuotaExceeded
from shared.runtime import metrics
from shared.runtime.clock import now_ms

QUOTA_RETRY_S = 60
UNKNOWN_RETRY_S, MAX_RETRY_S = 5, 60
"""When to submit again to a full queue: while no job has ended within the hour, and at most."""

PART_RECORD_BYTES = 150
"""What the part of a file costs Redis besides its text; items as in `footprint.lua`."""

_ITEM_RECORD_BYTES = 600
_FREED_BY = {
    "kept_jobs": "delete ended jobs, or wait until they expire",
    "record_bytes": "delete ended jobs and files, or wait until they and unused inputs expire",
    "stored_objects": "delete ended jobs and files, or wait until they and unused inputs expire",
    "stored_bytes": "delete ended jobs and files, or wait until they and unused inputs expire",
    "groups": "delete the jobs of one, wait until those of one expire, or name a group that exists",
    "idempotency_keys": "wait until the earlier ones expire, or submit without a key",
}


def quota_exceeded(tenant: str, quota: str, resets_at_ms: int | None = None) -> QuotaExceeded:
    """Return the error of a quota that a tenant has used up, and count it. Those of device time reset at a time."""
    metrics.quota_refusals.labels(quota).inc()
    message = f"quota of tenant {tenant!r} is used up: {quota}; "
    if resets_at_ms is None:
        return QuotaExceeded(message + _FREED_BY[quota], quota=quota, retry_after_s=QUOTA_RETRY_S)
    resets = datetime.fromtimestamp(resets_at_ms // 1000, UTC)
    wait_s = max(1, (resets_at_ms - now_ms()) // 1000)
    return QuotaExceeded(f"{message}it resets at {resets:%Y-%m-%dT%H:%M:%SZ}", quota=quota, retry_after_s=wait_s)


def full_queue_retry_s(limit: int, gap_ms: float | None) -> int:
    """Return when a hundredth of `limit` queued jobs has ended, one each `gap_ms`; None is unknown."""
    if gap_ms is None:
        return UNKNOWN_RETRY_S
    return math.ceil(min(MAX_RETRY_S, max(1.0, gap_ms * limit / 100_000)))


def adapter_size(stored_bytes: int, objects: int) -> str:
    """Return the size of an adapter, as `footprint.lua` counts it."""
    return f"0,{_ITEM_RECORD_BYTES},{objects},{stored_bytes}"


def input_size(ref: str, stored_bytes: int) -> str:
    """Return the size of an input image with its record."""
    return f"0,{_ITEM_RECORD_BYTES + len(ref.encode())},1,{stored_bytes}"


def resized(size: str, more_bytes: int) -> str:
    """Return the size of an item whose record has grown by `more_bytes`, which can be negative."""
    jobs, record_bytes, objects, stored = (int(number) for number in size.split(","))
    return f"{jobs},{max(0, record_bytes + more_bytes)},{objects},{stored}"


def parts_size(parts: Sequence[str]) -> str:
    """Return the size of a file's parts, `<bytes> <name>` each."""
    stored = sum(int(part.partition(" ")[0]) for part in parts)
    return f"0,{PART_RECORD_BYTES * len(parts)},{len(parts)},{stored}" if parts else ""
