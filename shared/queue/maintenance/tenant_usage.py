"""Usage of tenants: what each run has used, and the sums by day, tenant and model that scripts keep."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import astuple, dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from typing import Literal, TypeAlias, get_args

from shared.errors import InvalidRequest
from shared.job_record import Outcome
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated

UsageGroup: TypeAlias = Literal["day", "tenant", "model"]
GROUPS: tuple[UsageGroup, ...] = get_args(UsageGroup)
"""By what usage can be divided, in the order of rows."""

MAX_DAYS = 366
"""Most days of a query."""

_ROWS = 1000
"""Rows read at once: 2 ms of a process."""

_EPOCH = date(1970, 1, 1)


@dataclass(frozen=True)
class RunUsage:
    """What one run of a job has used. Device time is in microseconds: sums of whole numbers are exact."""

    device_us: int = 0
    steps: int = 0
    skipped_steps: int = 0
    images: int = 0
    videos: int = 0
    output_bytes: int = 0

    def wire(self) -> str:
        """Return the numbers as the queue's scripts read them."""
        return ",".join(map(str, astuple(self)))


def used_by(outcome: Outcome) -> RunUsage:
    """Return what the run with this outcome has used. `steps` are those computed, over all images."""
    skipped = outcome.batching.skipped_steps
    videos = sum(artifact.kind == "video" for artifact in outcome.artifacts)
    return RunUsage(
        device_us=max(0, round(1e6 * outcome.device_seconds)),
        steps=max(0, outcome.progress.step - skipped - outcome.resumed_steps),
        skipped_steps=skipped,
        images=len(outcome.artifacts) - videos,
        videos=videos,
        output_bytes=sum(artifact.bytes for artifact in outcome.artifacts),
    )


@dataclass
class UsageSum:
    """Usage of several jobs: how many ended in each state, and what all their runs have used."""

    succeeded: int = 0
    failed: int = 0
    canceled: int = 0
    expired: int = 0
    device_us: int = 0
    steps: int = 0
    skipped_steps: int = 0
    images: int = 0
    videos: int = 0
    output_bytes: int = 0

    @classmethod
    def parsed(cls, text: str) -> UsageSum:
        """Return the numbers that the queue's scripts have written."""
        return cls(*map(int, text.split(",")))

    def add(self, other: UsageSum) -> None:
        for number in fields(self):
            setattr(self, number.name, getattr(self, number.name) + getattr(other, number.name))

    @property
    def device_seconds(self) -> float:
        return self.device_us / 1e6


@dataclass(frozen=True)
class UsageRow:
    """Usage of a day, tenant and model; None for what the row is not divided by."""

    day: str | None = None
    tenant: str | None = None
    model: str | None = None
    sum: UsageSum = field(default_factory=UsageSum)


@dataclass(frozen=True)
class UsageQuery:
    """Which usage is meant, both days included, and by what it is divided."""

    first: date
    last: date
    tenant: str | None = None
    model: str | None = None
    groups: frozenset[UsageGroup] = frozenset(GROUPS)


class UsageRecords(QueueComponent):
    async def today(self) -> date:
        """Return the day by Redis' clock, which divides the usage."""
        return datetime.fromtimestamp(await self._client.now_ms() / 1000, UTC).date()

    async def page(self, query: UsageQuery, after: str | None, limit: int) -> tuple[list[UsageRow], str | None]:
        """Return rows in the order of day, tenant and model, and the cursor `after` of the next page, if any.

        A page reads as many days as it has rows of, or all if its rows are not divided by day.
        """
        sums: dict[str, UsageSum] = {}
        by_day, start = "day" in query.groups, _day_of(after) if "day" in query.groups else None
        for day in await self._days(max(query.first, start or query.first), query.last):
            begin = (after or "").partition("|")[2] if day == start and len(query.groups) == len(GROUPS) else ""
            async with aclosing(self._rows(day, query.tenant, begin)) as rows:
                async for name, row in rows:
                    tenant, _, model = name.partition("|")
                    cursor = _cursor(query.groups, day, tenant, model)
                    if query.model in (None, model) and (after is None or cursor > after):
                        sums.setdefault(cursor, UsageSum()).add(row)
            if by_day and len(sums) > limit:
                break
        cursors = sorted(sums)
        page = [_row(query.groups, cursor, sums[cursor]) for cursor in cursors[:limit]]
        return page, cursors[limit - 1] if len(cursors) > limit else None

    async def of_tenants(self, first: date, last: date, tenants: Sequence[str]) -> dict[str, UsageSum]:
        """Return the usage of some tenants from `first` to `last`, over all models."""
        sums = {tenant: UsageSum() for tenant in tenants}
        for number in map(_number, await self._days(first, last) if tenants else ()):
            with translated():
                async with self._redis.pipeline(transaction=False) as pipe:
                    for tenant in tenants:
                        pipe.zrangebylex(self._keys.usage_rows(number), f"[{tenant}|", f"({tenant}}}", 0, _ROWS)
                    names = [name for own in await pipe.execute() for name in own]
                rows = await self._redis.hmget(self._keys.usage(number), names) if names else []
            for name, row in zip(names, rows, strict=True):
                if row is not None:  # expired in between
                    sums[name.partition("|")[0]].add(UsageSum.parsed(row))
        return sums

    async def _days(self, first: date, last: date) -> list[date]:
        """Return the days from `first` to `last` that have usage."""
        days = [first + timedelta(days=number) for number in range((last - first).days + 1)]
        if not days:
            return []
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for day in days:
                    pipe.exists(self._keys.usage_rows(_number(day)))
                found = await pipe.execute()
        return [day for day, exists in zip(days, found, strict=True) if exists]

    async def _rows(self, day: date, tenant: str | None, after: str) -> AsyncGenerator[tuple[str, UsageSum]]:
        """Yield the rows of a day with their names `tenant|model`, in this order."""
        name, number = self._keys.usage_rows(_number(day)), _number(day)
        own = "" if tenant is None else f"{tenant}|"
        low = f"({after}" if after.startswith(own) and after else f"[{own}" if own else "-"  # a client names `after`
        high = "+" if tenant is None else f"({tenant}}}"  # the character after the separator
        while True:
            with translated():
                names = await self._redis.zrangebylex(name, low, high, 0, _ROWS)
                rows = await self._redis.hmget(self._keys.usage(number), names) if names else []
            for one, row in zip(names, rows, strict=True):
                if row is not None:  # expired in between
                    yield one, UsageSum.parsed(row)
            if len(names) < _ROWS:
                return
            low = f"({names[-1]}"


def _number(day: date) -> str:
    return str((day - _EPOCH).days)


def _cursor(groups: frozenset[UsageGroup], day: date, tenant: str, model: str) -> str:
    """Return the place of a row in the order: its parts, of which those that do not divide are empty."""
    parts = {"day": day.isoformat(), "tenant": tenant, "model": model}
    return "|".join(parts[group] if group in groups else "" for group in GROUPS)


def _row(groups: frozenset[UsageGroup], cursor: str, sums: UsageSum) -> UsageRow:
    named = dict(zip(GROUPS, cursor.split("|"), strict=True))
    return UsageRow(sum=sums, **{group: named[group] for group in groups})


def _day_of(cursor: str | None) -> date | None:
    """Return the day in a cursor of rows by day."""
    if cursor is None:
        return None
    try:
        return date.fromisoformat(cursor.partition("|")[0])
    except ValueError:
        raise InvalidRequest(
            "after: not a cursor of this list; pass the `next_cursor` of a page", param="after"
        ) from None
