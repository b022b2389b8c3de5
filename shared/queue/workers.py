"""Workers: heartbeats, measured costs, and the load that decides how many workers are needed."""

import json
from collections.abc import Collection
from dataclasses import asdict

from pydantic import TypeAdapter, ValidationError

from shared.autoscaling import SignatureLoad
from shared.queue.client import QueueComponent, translated
from shared.queue.records import RANKS, QueueDepth, WorkerInfo

WORKER_TTL_S = 30
MAX_SIGNATURES = 1000
MAX_WORKERS = 1000
_CHUNK = 50
_WORKER = TypeAdapter(WorkerInfo)


class Workers(QueueComponent):
    async def heartbeat(self, info: WorkerInfo, holds: Collection[str] = ()) -> None:
        """Store that a worker is alive, for `WORKER_TTL_S`; `holds` are the models in its memory or being loaded."""
        await self._scripts.heartbeat(info.id, json.dumps(asdict(info)), WORKER_TTL_S * 1000, *holds)

    async def all(self) -> list[WorkerInfo]:
        """Return the workers that are alive."""
        with translated():
            names = await self._redis.zrange(self._keys.workers, 0, MAX_WORKERS - 1)
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hmget(self._keys.worker(name), "info", "beat")
                rows = await pipe.execute()
        return [worker for info, beat in rows if info is not None and (worker := _worker(info, beat)) is not None]

    async def learn_cost(self, device: str, model: str, shape: str, rows: int, seconds: float) -> None:
        """Add one measured forward to the cost curve: moving means of seconds by rows, kept for 30 days."""
        await self._scripts.learn_cost(device, model, shape, rows, seconds)

    async def cost_curve(self, device: str, model: str, shape: str) -> dict[int, float]:
        """Return the measured seconds per forward by rows."""
        with translated():
            learned = await self._redis.hgetall(self._keys.cost_curve(device, model, shape))
        return {int(rows): float(seconds) for rows, seconds in sorted(learned.items(), key=lambda row: int(row[0]))}

    async def learn_start_time(self, seconds: float) -> None:
        """Add the seconds from a worker's start to its readiness to a moving mean, kept for a week."""
        await self._scripts.learn_start_time(seconds)

    async def mean_start_s(self) -> float:
        """Return the mean start time of workers; 0: unknown."""
        with translated():
            return float(await self._redis.get(self._keys.worker_start_s) or 0)

    async def queue_depths(self) -> list[QueueDepth]:
        """Return queued and running jobs by signature, most queued slots first, at most `MAX_SIGNATURES`."""
        with translated():
            signatures = await self._redis.zrange(self._keys.signatures, 0, MAX_SIGNATURES - 1, desc=True)
        rows: list[list[int | str]] = []
        for first in range(0, len(signatures), _CHUNK):
            rows += await self._scripts.queue_depths(*signatures[first : first + _CHUNK])
        return [_depth(row) for row in rows if row[1]]

    async def signature_loads(self) -> list[SignatureLoad]:
        """Return the load of each signature with its measured costs, for autoscaling."""
        depths = await self.queue_depths()
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for depth in depths:
                    pipe.hmget(self._keys.slot_cost(depth.signature), "slot_s", "rows")
                    pipe.hmget(self._keys.slot_cost(f"model|{depth.model}"), "slot_s", "rows")
                    pipe.get(self._keys.cost_device(depth.model, _shape(depth)))
                rows = await pipe.execute()
        loads = []
        for depth, own, models, device in zip(depths, rows[0::3], rows[1::3], rows[2::3], strict=True):
            slot_s, mean_rows = own if own[0] is not None else models
            curve = None if device is None else await self.cost_curve(device, depth.model, _shape(depth))
            loads.append(
                SignatureLoad(
                    signature=depth.signature,
                    queued_slots=depth.queued_slots,
                    running_slots=depth.running_jobs,
                    oldest_wait_s=(depth.oldest_age_ms or 0) / 1000,
                    slot_s=None if slot_s is None else float(slot_s),
                    rows=float(mean_rows or 1),
                    cost_curve=curve,
                )
            )
        return loads


def _shape(depth: QueueDepth) -> str:
    """Return the shape part of the signature as workers store it in cost curves: without the frames of an image."""
    return depth.signature.removeprefix(f"{depth.model}:").partition(":")[0].removesuffix("x1")


def _depth(row: list[int | str]) -> QueueDepth:
    numbers = [int(value) for value in row[2:]]
    queued, (running, age_ms, gap_ms) = numbers[:6], numbers[6:]
    jobs = dict(zip(RANKS, queued[0::2], strict=True))
    return QueueDepth(
        signature=str(row[0]),
        model=str(row[1]),
        jobs=jobs,
        slots=dict(zip(RANKS, queued[1::2], strict=True)),
        running_jobs=running,
        oldest_age_ms=None if age_ms < 0 else age_ms,
        eta_s=None if gap_ms < 0 else gap_ms * (sum(jobs.values()) + running) / 1000,
    )


def _worker(info: str, beat: str | None) -> WorkerInfo | None:
    try:
        worker = _WORKER.validate_json(info)
    except ValidationError:
        return None
    return WorkerInfo(**{**worker.__dict__, "beat_at_ms": int(beat or 0)})
