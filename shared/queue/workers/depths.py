"""How much is queued and running: by signature, with the ages of the oldest jobs, and by model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from shared.job_fields import Priority
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.maintenance.pauses import PauseControls, Pauses
from shared.queue.order.position import expected_s
from shared.queue.records import RANKS, ModelDepth, QueueDepth
from shared.queue.redis_keys import RANK_SPAN
from shared.queue.workers.running_limits import RunningLimits

MAX_COUNTED = 100_000
_CHUNK = 100
_COUNTED_CHUNK = 200
_OLDEST_READ = 8
"""Lanes of each rank, the oldest first, and jobs with a deadline, the least slack first."""

_RETURNED_READ = 32
"""Released and lost jobs of a signature, of each kind, that are read for the work that their checkpoints spare."""

_FIELDS = ("model", *(f"{count}:{rank}" for rank in range(len(RANKS)) for count in ("jobs", "slots")), "running")


class _Counts(NamedTuple):
    """The counters of a signature; in `queued` jobs and slots alternate, by rank."""

    model: str
    queued: Sequence[int]
    running: int

    @property
    def jobs(self) -> dict[Priority, int]:
        return dict(zip(RANKS, self.queued[0::2], strict=True))

    @property
    def slots(self) -> dict[Priority, int]:
        return dict(zip(RANKS, self.queued[1::2], strict=True))


class _Oldest(NamedTuple):
    """A tenant and the arrival of a job of it that is among the oldest of its signature and rank."""

    tenant: str
    arrived_ms: float


class _Spared(NamedTuple):
    """A queued job with a checkpoint, and the part of its work that this spares."""

    rank: Priority
    slots: int
    part: float


class _Moment(NamedTuple):
    """What was read of all signatures: the time, the pauses, and the tenants that are held back."""

    now_ms: int
    pauses: Pauses
    held_back: AbstractSet[str]


class Depths(QueueComponent):
    async def of_signatures(self, signatures: Sequence[str]) -> list[QueueDepth]:
        """Return queued and running jobs of signatures."""
        pauses, found = await PauseControls(self._client).all(), list[QueueDepth]()
        for first in range(0, len(signatures), _CHUNK):
            found += await self._of_chunk(signatures[first : first + _CHUNK], pauses)
        return found

    async def of_models(self) -> list[ModelDepth]:
        """Return the jobs of up to `MAX_COUNTED` signatures by model."""
        sums: dict[str, list[_Counts]] = defaultdict(list)
        seen: set[str] = set()  # a scan can return a member twice
        cursor = 0
        while True:
            with translated():
                cursor, rows = await self._redis.zscan(self._keys.signatures, cursor, count=_COUNTED_CHUNK)
            new = [signature for signature, _ in rows if signature not in seen]
            seen.update(new)
            for one in (await self._counts(new)).values():
                sums[one.model].append(one)
            if int(cursor) == 0 or len(seen) >= MAX_COUNTED:
                return [_model_depth(model, counts) for model, counts in sums.items()]

    async def _of_chunk(self, signatures: Sequence[str], pauses: Pauses) -> list[QueueDepth]:
        counts, now = await self._counts(signatures), await self._client.now_ms()
        gaps = await self._replies([("HGET", self._keys.arrivals(signature), "done_gap") for signature in counts])
        oldest = await self._oldest(counts)
        spared = await self._spared(counts)
        held_back = await self._held_back({one.tenant for rows in oldest.values() for one in rows}, pauses)
        moment = _Moment(now, pauses, held_back)
        return [
            _depth(signature, one, gap, {rank: oldest[signature, rank] for rank in RANKS}, spared[signature], moment)
            for (signature, one), gap in zip(counts.items(), gaps, strict=True)
        ]

    async def _counts(self, signatures: Sequence[str]) -> dict[str, _Counts]:
        """Return the counters of the signatures that have any."""
        rows = await self._replies([("HMGET", self._keys.signature(one), *_FIELDS) for one in signatures])
        found = {}
        for signature, (model, *numbers) in zip(signatures, rows, strict=True):
            *queued, running = (max(0, int(number or 0)) for number in numbers)
            if model:
                found[signature] = _Counts(model, queued, running)
        return found

    async def _oldest(self, counts: Mapping[str, _Counts]) -> dict[tuple[str, Priority], list[_Oldest]]:
        """Return some of the oldest jobs of signatures and ranks: of lanes, returned ones, and dated ones."""
        parts = [(signature, rank) for signature, one in counts.items() for rank in RANKS if one.jobs[rank]]
        replies = await self._replies([read for part in parts for read in self._oldest_reads(*part)])
        oldest: dict[tuple[str, Priority], list[_Oldest]] = defaultdict(list)
        returned: list[tuple[tuple[str, Priority], str]] = []
        for part, (lanes, *ids) in zip(parts, zip(*[iter(replies)] * 4, strict=True), strict=True):
            oldest[part] += [_Oldest(lane, float(at)) for lane, at in zip(lanes[::2], lanes[1::2], strict=True)]
            returned += [(part, job_id) for some in ids for job_id in some]
        rows = await self._replies([("HMGET", self._keys.job(job_id), "tenant", "arrived") for _, job_id in returned])
        for (part, _), (tenant, arrived) in zip(returned, rows, strict=True):
            if tenant and arrived:
                oldest[part].append(_Oldest(tenant, float(arrived)))
        return oldest

    async def _spared(self, counts: Mapping[str, _Counts]) -> dict[str, list[_Spared]]:
        """Return the first released and lost jobs that have a checkpoint; others cannot have one."""
        spared: dict[str, list[_Spared]] = {signature: [] for signature in counts}
        queued = [signature for signature, one in counts.items() if any(one.queued)]
        names = [(signature, name(signature)) for signature in queued for name in (self._keys.front, self._keys.solo)]
        replies = await self._replies([("ZRANGE", name, 0, _RETURNED_READ - 1) for _, name in names])
        jobs = [(signature, job_id) for (signature, _), ids in zip(names, replies, strict=True) for job_id in ids]
        rows = await self._replies([("HMGET", self._keys.job(job_id), "rank", "slots", "left") for _, job_id in jobs])
        for (signature, _), (rank, slots, left) in zip(jobs, rows, strict=True):
            if rank and slots and left:
                spared[signature].append(_Spared(RANKS[int(rank)], int(slots), 1 - float(left)))
        return spared

    def _oldest_reads(self, signature: str, rank: Priority) -> Iterator[tuple[str | int, ...]]:
        keys, low, high = self._keys, rank.rank * RANK_SPAN, f"({(rank.rank + 1) * RANK_SPAN}"
        yield "ZRANGE", keys.lanes(signature, rank.value), 0, _OLDEST_READ - 1, "WITHSCORES"
        for name, count in (
            (keys.front(signature), 1),
            (keys.solo(signature), 1),
            (keys.dated(signature), _OLDEST_READ),
        ):
            yield "ZRANGEBYSCORE", name, low, high, "LIMIT", 0, count

    async def _held_back(self, tenants: AbstractSet[str], pauses: Pauses) -> AbstractSet[str]:
        """Return the tenants that are paused, or whose limit of running slots does not let all queued jobs start."""
        if not tenants:
            return tenants
        limits = await RunningLimits(self._client).of(sorted(tenants), pauses.tenants)
        with translated():
            queued = await self._redis.hmget(self._keys.queued_jobs, list(limits))
        rows = zip(limits.items(), queued, strict=True)
        return {tenant for (tenant, limit), jobs in rows if limit.holds_some_back(int(jobs or 0))}


def _depth(
    signature: str,
    counts: _Counts,
    gap: str | None,
    oldest: Mapping[Priority, Sequence[_Oldest]],
    spared: Sequence[_Spared],
    moment: _Moment,
) -> QueueDepth:
    paused, bulk = moment.pauses.has_model(counts.model), oldest[Priority.BULK]
    others = [one for rank, rows in oldest.items() if rank is not Priority.BULK for one in rows]
    free = [] if paused else [one for one in others if one.tenant not in moment.held_back]
    jobs = sum(counts.jobs.values()) + counts.running - sum(one.part for one in spared)
    return QueueDepth(
        signature=signature,
        model=counts.model,
        jobs=counts.jobs,
        slots=counts.slots,
        running_jobs=counts.running,
        oldest_age_ms=_age_ms([*others, *bulk], moment.now_ms),
        eta_s=expected_s(None if gap is None else float(gap), max(0.0, jobs)),
        waiting_ms=_age_ms(free, moment.now_ms),
        bulk_age_ms=_age_ms(bulk, moment.now_ms),
        paused=paused,
        spared_slots={rank: sum(one.slots * one.part for one in spared if one.rank is rank) for rank in RANKS},
    )


def _age_ms(jobs: Sequence[_Oldest], now_ms: int) -> int | None:
    arrived_ms = min((one.arrived_ms for one in jobs), default=None)
    return None if arrived_ms is None else max(0, int(now_ms - arrived_ms))


def _model_depth(model: str, counts: Sequence[_Counts]) -> ModelDepth:
    jobs, slots = ({rank: sum(one[rank] for one in rows) for rank in RANKS} for rows in _by_rank(counts))
    return ModelDepth(model, jobs, slots, sum(one.running for one in counts), len(counts))


def _by_rank(counts: Sequence[_Counts]) -> Iterator[list[dict[Priority, int]]]:
    yield [one.jobs for one in counts]
    yield [one.slots for one in counts]
