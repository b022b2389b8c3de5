"""What can be asked of the queue, and answered at a bounded cost."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from shared.autoscaling import Line
from shared.errors import InvalidRequest
from shared.job import JobRecord
from shared.queue.client import Connected, translated
from shared.queue.records import record
from shared.queue.values import RANKS, Place, QueueDepth, WorkerInfo
from shared.runtime.clock import made_at_ms

MAX_SIGNATURES = 1000
MAX_WORKERS = 1000
MAX_LISTED = 1000
_LIST_ROUNDS = 5
_DEPTHS_AT_ONCE = 50
_WORKER = TypeAdapter(WorkerInfo)


class Reading(Connected):
    async def get(self, job_id: str) -> JobRecord | None:
        """Return what is known of a job: one read."""
        with translated():
            return record(await self.redis.hgetall(self.keys.job(job_id)))

    async def get_many(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """Return what is known of each job, in one round trip."""
        if not job_ids:
            return []
        with translated():
            async with self.redis.pipeline(transaction=False) as pipe:
                for job_id in job_ids:
                    pipe.hgetall(self.keys.job(job_id))
                return [record(fields) for fields in await pipe.execute()]

    async def place(self, job_id: str) -> Place | None:
        """Return where a waiting job stands among those of its signature; None when it does not wait.

        Exact up to 500 jobs ahead in its lane, estimated from arrival times beyond. `eta_s` supposes that jobs go on
        ending at the signature's pace of late; None where none has ended within the hour.
        """
        answer = await self.run("place", job_id)
        if not answer:
            return None
        position, eta_ms = answer
        return Place(position=position, eta_s=None if eta_ms < 0 else eta_ms / 1000)

    async def list_jobs(
        self,
        tenant: str,
        *,
        batch_id: str | None = None,
        after: str | None = None,
        limit: int = 20,
        created_after_ms: int | None = None,
        created_before_ms: int | None = None,
    ) -> tuple[list[JobRecord], str | None]:
        """Return up to `limit` of a tenant's jobs, newest first, and what to pass as `after` for more; None: no more.

        `after` is the id of the last job seen, which may have been deleted since. `created_after_ms` is inclusive,
        `created_before_ms` exclusive.
        """
        index = self.keys.jobs(tenant) if batch_id is None else self.keys.batch(tenant, batch_id)
        limit = max(1, min(limit, MAX_LISTED))
        start = await self._start(index, after, created_before_ms)
        found: list[JobRecord] = []
        for _ in range(_LIST_ROUNDS):
            wanted = limit - len(found)
            with translated():
                rows = await self.redis.zrange(index, start, start + wanted, desc=True, withscores=True)
            start += wanted
            ids = [row[0] for row in rows if created_after_ms is None or row[1] >= created_after_ms]
            more = len(ids) > wanted
            found += [one for one in await self.get_many(ids[:wanted]) if one is not None]
            if not more or len(found) >= limit:
                return found, found[-1].job.id if more and found else None
        return found, found[-1].job.id if found else None

    async def job_before(self, tenant: str, job_id: str, count: int) -> str | None:
        """Return the job that was put in line `count` later than one of a tenant's; None where there is none."""
        index = self.keys.jobs(tenant)
        with translated():
            rank = await self.redis.zrevrank(index, job_id)
            if rank is None or int(rank) < count:
                return None
            found = await self.redis.zrange(index, int(rank) - count, int(rank) - count, desc=True)
        return str(found[0]) if found else None

    async def videos(
        self, tenant: str, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[JobRecord], bool]:
        """Return up to `limit` of a tenant's video jobs, and whether there are more; `after` is the last job seen."""
        index = self.keys.videos(tenant)
        with translated():
            rank = -1
            if after is not None:
                found = await (self.redis.zrevrank if newest_first else self.redis.zrank)(index, after)
                if found is None:
                    raise InvalidRequest("after: there is no such video, or no longer", param="after")
                rank = int(found)
            ids = await self.redis.zrange(index, rank + 1, rank + 1 + limit, desc=newest_first)
        records = await self.get_many([str(one) for one in ids[:limit]])
        return [one for one in records if one is not None], len(ids) > limit

    async def _start(self, index: str, after: str | None, before_ms: int | None) -> int:
        with translated():
            skipped = 0 if before_ms is None else int(await self.redis.zcount(index, before_ms, "+inf"))
            if after is None:
                return skipped
            rank = await self.redis.zrevrank(index, after)
            if rank is not None:
                return max(skipped, int(rank) + 1)
            at_ms = made_at_ms(after)
            if at_ms is None:
                raise InvalidRequest("after: it must be the `next_cursor` of a page of this list", param="after")
            # Deleted since: where it stood, by its time, and among those of the same millisecond by its id.
            later = int(await self.redis.zcount(index, f"({at_ms}", "+inf"))
            beside = await self.redis.zrange(index, at_ms, at_ms, byscore=True, offset=0, num=MAX_LISTED)
            return max(skipped, later + sum(str(one) > after for one in beside))

    async def queues(self) -> list[QueueDepth]:
        """Return what waits and runs, signature by signature, the longest lines first, at most 1000."""
        with translated():
            signatures = await self.redis.zrange(self.keys.signatures, 0, MAX_SIGNATURES - 1, desc=True)
        rows: list[list[int | str]] = []
        for first in range(0, len(signatures), _DEPTHS_AT_ONCE):
            rows += await self.run("queues", *signatures[first : first + _DEPTHS_AT_ONCE])
        return [_depth(row) for row in rows if row[1]]

    async def workers(self) -> list[WorkerInfo]:
        """Return the workers whose heart beats."""
        with translated():
            names = await self.redis.zrange(self.keys.workers, 0, MAX_WORKERS - 1)
            async with self.redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hmget(self.keys.worker(name), "info", "beat")
                rows = await pipe.execute() if names else []
        return [worker for info, beat in rows if info is not None and (worker := _worker(info, beat)) is not None]

    async def curve(self, device: str, model: str, shape: str) -> dict[int, float]:
        """Return the learned seconds per forward by rows."""
        with translated():
            learned = await self.redis.hgetall(self.keys.curve(device, model, shape))
        return {int(rows): float(seconds) for rows, seconds in sorted(learned.items(), key=lambda row: int(row[0]))}

    async def lines(self) -> list[Line]:
        """Return what waits and runs with what it costs, for the scale of a pool."""
        depths = await self.queues()
        with translated():
            async with self.redis.pipeline(transaction=False) as pipe:
                for depth in depths:
                    pipe.hmget(self.keys.cost(depth.signature), "seat_s", "rows")
                    pipe.hmget(self.keys.cost(f"model|{depth.model}"), "seat_s", "rows")
                    pipe.get(self.keys.learned(depth.model, _shape(depth)))
                rows = await pipe.execute() if depths else []
        lines = []
        for depth, own, models, device in zip(depths, rows[0::3], rows[1::3], rows[2::3], strict=True):
            seat_s, mean_rows = own if own[0] is not None else models
            curve = None if device is None else await self.curve(device, depth.model, _shape(depth))
            lines.append(
                Line(
                    signature=depth.signature,
                    waiting_seats=depth.waiting_seats,
                    running_seats=depth.running,
                    oldest_wait_s=(depth.oldest_age_ms or 0) / 1000,
                    seat_s=None if seat_s is None else float(seat_s),
                    rows=float(mean_rows or 1),
                    curve=curve,
                )
            )
        return lines


def _shape(depth: QueueDepth) -> str:
    """Return the shape under which workers learn: the part of the signature that spells it, without a single frame."""
    return depth.signature.removeprefix(f"{depth.model}:").partition(":")[0].removesuffix("x1")


def _depth(row: list[int | str]) -> QueueDepth:
    numbers = [int(value) for value in row[2:]]
    waiting, (running, age_ms, gap_ms) = numbers[:6], numbers[6:]
    jobs = dict(zip(RANKS, waiting[0::2], strict=True))
    return QueueDepth(
        signature=str(row[0]),
        model=str(row[1]),
        jobs=jobs,
        seats=dict(zip(RANKS, waiting[1::2], strict=True)),
        running=running,
        oldest_age_ms=None if age_ms < 0 else age_ms,
        eta_s=None if gap_ms < 0 else gap_ms * (sum(jobs.values()) + running) / 1000,
    )


def _worker(info: str, beat: str | None) -> WorkerInfo | None:
    try:
        worker = _WORKER.validate_json(info)
    except ValidationError:
        return None
    return WorkerInfo(**{**worker.__dict__, "beat_at_ms": int(beat or 0)})
