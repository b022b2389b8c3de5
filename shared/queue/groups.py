"""Groups: the jobs of a tenant that have one name, how many of them have each state, and when all will have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shared.errors import NotFound
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.order.expected_ends import queue_positions
from shared.queue.order.facts import unfinished_jobs
from shared.queue.records import page_after

STATES = ("queued", "paused", "running", "succeeded", "failed", "canceled", "expired")
"""What `groups.lua` counts, in the order of its places: states of jobs, and `paused` for queued jobs that are."""

RUN = ("succeeded", "failed")
"""States of jobs that a worker has ended: those that are canceled or expire say nothing about the rate."""

SPAN = 2**42
"""Between the scores of two states in `group_states`, as in `groups.lua`."""

RATE_S = 300
"""The time whose ended jobs make the rate."""


@dataclass(frozen=True)
class Group:
    """A group at one moment; times are those of Redis.

    `recent` jobs have succeeded or failed within the last `recent_s` seconds. `device_seconds` are those of all its
    jobs that have ended, deleted ones too. `queue_eta_s` is the time until its last queued job is expected to end, None
    if unknown; where the group has a rate, only of a job that is for later or waits for others.
    """

    name: str
    jobs: Mapping[str, int]
    first_submit_ms: int
    last_submit_ms: int
    device_seconds: float
    recent: int
    recent_s: float
    queue_eta_s: float | None = None

    @property
    def rate_per_minute(self) -> float:
        """Jobs that have succeeded or failed each minute of the last ones."""
        return 60 * self.recent / self.recent_s if self.recent_s > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """The time until all jobs that are not paused have ended: at the group's rate, or as the queue expects."""
        left = self.jobs["queued"] + self.jobs["running"]
        if not left:
            return None
        if not self.recent:
            return self.queue_eta_s
        return max(left * self.recent_s / self.recent, self.queue_eta_s or 0.0)


class Groups(QueueComponent):
    async def get(self, tenant: str, name: str) -> Group:
        """Return a group of a tenant, or raise `NotFound`."""
        with translated():
            last_ms = await self._redis.zscore(self._keys.groups(tenant), name)
        if last_ms is None:
            raise NotFound(f"there is no group {name[:64]}, or its jobs have been deleted", param="group")
        return (await self._read(tenant, {name: int(last_ms)}))[0]

    async def page(self, tenant: str, after: str | None, limit: int) -> tuple[list[Group], str | None]:
        """Return up to `limit` groups of a tenant, those with the latest submits first, and the cursor of the next
        page, if there is one."""
        with translated():
            page, cursor = await page_after(self._redis, self._keys.groups(tenant), after, limit)
        return await self._read(tenant, {name: int(at.partition(":")[0]) for name, at in page}), cursor

    async def _read(self, tenant: str, last_submits: Mapping[str, int]) -> list[Group]:
        now_ms = await self._client.now_ms()
        commands = [command for name in last_submits for command in self._reads(tenant, name, now_ms)]
        replies = await self._replies(commands)
        each = len(commands) // max(1, len(last_submits))
        found = [
            _group(name, last_ms, now_ms, replies[at * each : (at + 1) * each])
            for at, (name, last_ms) in enumerate(last_submits.items())
        ]
        places = await self._replies(("HGET", self._keys.job(last_queued), "src") for _, last_queued in found)
        return [
            replace(group, queue_eta_s=await self._eta_s(last_queued))
            if last_queued and (place == "waiting" or not group.recent)
            else group
            for (group, last_queued), place in zip(found, places, strict=True)
        ]

    async def _eta_s(self, job_id: str) -> float | None:
        position = queue_positions(unfinished_jobs(await self._scripts.read_places(job_id))).get(job_id)
        return None if position is None else position.eta_s

    def _reads(self, tenant: str, name: str, now_ms: int) -> list[Sequence[str | int]]:
        index = self._keys.group_states(tenant, name)
        recent = [("ZCOUNT", index, *_scores(state, now_ms - 1000 * RATE_S)) for state in RUN]
        return [
            ("HMGET", self._keys.group(tenant, name), "first", "device_us"),
            ("ZREVRANGEBYSCORE", index, *reversed(_scores("queued")), "LIMIT", 0, 1),
            *(("ZCOUNT", index, *_scores(state)) for state in STATES),
            *recent,
        ]


def has_state(score: str | float | None, state: str) -> bool:
    """Return whether a score of `group_states` is that of a state."""
    return score is not None and int(float(score) // SPAN) == STATES.index(state)


def _scores(state: str, first_ms: int = 0) -> tuple[int | str, int | str]:
    """Return the range of scores of jobs that have a state, since `first_ms` or later."""
    place = STATES.index(state) * SPAN
    return place + max(0, first_ms), f"({place + SPAN}"


def _group(name: str, last_ms: int, now_ms: int, replies: Sequence[Any]) -> tuple[Group, str]:
    """Return a group from the replies to its reads, and the job that was queued last, "" without one."""
    (first, device_us), last_queued, *counts = replies
    first_ms = int(first or last_ms)
    group = Group(
        name=name,
        jobs=dict(zip(STATES, counts[: len(STATES)], strict=True)),
        first_submit_ms=first_ms,
        last_submit_ms=last_ms,
        device_seconds=int(device_us or 0) / 1e6,
        recent=sum(counts[len(STATES) :]),
        recent_s=min(RATE_S, max(1.0, (now_ms - first_ms) / 1000)),
    )
    return group, str(next(iter(last_queued), ""))
