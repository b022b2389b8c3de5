"""What jobs have used, by day, tenant and model."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from fusequeue.errors import InvalidArgument
from fusequeue.response_types import Resource
from fusequeue.service import Model

Day: TypeAlias = datetime.date | str
"""A day (UTC), or its text such as 2026-01-31."""

UsageGroup: TypeAlias = Literal["day", "tenant", "model"]


class UsageJobs(Resource):
    """Jobs by their end, those that never ran included."""

    succeeded: int = 0
    failed: int = 0
    canceled: int = 0
    expired: int = 0


class UsageRow(Resource):
    """What jobs have used; day, tenant and model are None where rows are not divided by them."""

    day: datetime.date | None = None
    tenant: str | None = None
    model: str | None = None
    device_seconds: float
    jobs: UsageJobs = UsageJobs()
    images: int = 0
    videos: int = 0
    output_bytes: int = 0
    steps: int = 0
    skipped_steps: int = 0


def usage_query(
    first_day: Day | None,
    last_day: Day | None,
    tenant: str | None,
    model: Model | str | None,
    group_by: Sequence[UsageGroup],
) -> dict[str, Any]:
    """Return the query of `GET /v1/usage`."""
    if isinstance(group_by, str):
        raise InvalidArgument(f"group_by: {group_by!r:.40} is not a list of day, tenant and model")
    return {
        "from": _day(first_day),
        "to": _day(last_day),
        "tenant": tenant,
        "model": model.id if isinstance(model, Model) else model,
        "group_by": ",".join(group_by) or "none",
    }


def _day(day: Day | None) -> str | None:
    if isinstance(day, datetime.datetime):
        raise InvalidArgument("a day is a date, without a time")
    return day.isoformat() if isinstance(day, datetime.date) else day
