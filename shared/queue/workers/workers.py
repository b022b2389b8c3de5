"""Workers: heartbeats, measured costs, and the load that decides how many workers are needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from shared.autoscaling import Backlog, SignatureLoad
from shared.job_fields import Priority
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.maintenance.pauses import PauseControls
from shared.queue.records import RANKS, CostCurve, ModelDepth, QueueDepth, QueueLoad, WorkerInfo
from shared.queue.transactions import Transaction
from shared.queue.workers.backlog_sample import BacklogSample
from shared.queue.workers.depths import Depths

WORKER_TTL_S = 30
MAX_SIGNATURES = 1000
MAX_WORKERS = 1000
MAX_CURVES = 64
_CURVE_MS = 30 * 86_400_000
_START_TIME_MS = 7 * 86_400_000
_FIRST_READY = 4
_WORKER = TypeAdapter(WorkerInfo)


class Workers(QueueComponent):
    async def heartbeat(self, info: WorkerInfo, holds: Collection[str] = ()) -> bool:
        """Store that a worker is alive, for `WORKER_TTL_S`; `holds` are the models in its memory or being loaded.

        Heartbeats also wake workers again: jobs of the worker's models can have lost their wake-up. Return whether jobs
        for later are due.
        """
        served = "\n".join(info.models)
        digest = hashlib.blake2b(served.encode(), digest_size=8).hexdigest()
        encoded = json.dumps(asdict(info))
        return await self._scripts.heartbeat(info.id, encoded, WORKER_TTL_S * 1000, served, digest, *holds)

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
        name, shapes = self._keys.cost_curve(device, model, shape), self._keys.cost_shapes(model)

        async def attempt(transaction: Transaction) -> None:
            (mean,) = await transaction.read(("HGET", name, rows), fenced=False)
            learned = seconds if mean is None else float(mean) + 0.2 * (seconds - float(mean))
            transaction.write("HSET", name, rows, f"{learned:.9g}")
            transaction.write("PEXPIRE", name, _CURVE_MS)
            transaction.write("SET", self._keys.cost_device(model, shape), device, "PX", _CURVE_MS)
            transaction.write("ZADD", shapes, transaction.now_ms, f"{device}|{shape}")
            transaction.write("ZREMRANGEBYRANK", shapes, 0, -1 - MAX_CURVES)
            transaction.write("PEXPIRE", shapes, _CURVE_MS)

        await self._transact(attempt, when_full=True)

    async def cost_curve(self, device: str, model: str, shape: str) -> dict[int, float]:
        """Return the measured seconds per forward by rows."""
        with translated():
            learned = await self._redis.hgetall(self._keys.cost_curve(device, model, shape))
        return _curve(learned)

    async def cost_curves(self, model: str) -> list[CostCurve]:
        """Return the cost curves of a model, those measured last first."""
        with translated():
            listed = await self._redis.zrange(self._keys.cost_shapes(model), 0, -1, desc=True, withscores=True)
        named = [(*name.rsplit("|", 1), int(at)) for name, at in listed]
        curves = await self._hashes(self._keys.cost_curve(device, model, shape) for device, shape, _ in named)
        return [
            CostCurve(device, model, shape, _curve(learned), measured_at_ms=at)
            for (device, shape, at), learned in zip(named, curves, strict=True)
            if learned
        ]

    async def learn_start_time(self, seconds: float) -> None:
        """Add the seconds from a worker's start to its readiness to a moving mean, kept for a week."""
        name = self._keys.worker_start_s

        async def attempt(transaction: Transaction) -> None:
            (mean,) = await transaction.read(("GET", name), fenced=False)
            learned = seconds if mean is None else float(mean) + 0.3 * (seconds - float(mean))
            transaction.write("SET", name, f"{learned:.6g}", "PX", _START_TIME_MS)

        await self._transact(attempt, when_full=True)

    async def mean_start_s(self) -> float:
        """Return the mean start time of workers; 0: unknown."""
        with translated():
            return float(await self._redis.get(self._keys.worker_start_s) or 0)

    async def queue_depths(self) -> list[QueueDepth]:
        """Return queued and running jobs by signature, most queued slots first, at most `MAX_SIGNATURES`."""
        return await Depths(self._client).of_signatures(await self._longest())

    async def load(self) -> QueueLoad:
        """Return the jobs of all signatures by model, with the signatures of the longest queues and the oldest jobs."""
        depths = Depths(self._client)
        models = await depths.of_models()
        first_ready = await self._first_ready([one.model for one in models])
        signatures = list(dict.fromkeys([*await self._longest(), *first_ready]))
        return QueueLoad(models, await depths.of_signatures(signatures))

    async def backlog(self, load: QueueLoad, expected_s: Mapping[str, float]) -> Backlog:
        """Return what waits, for autoscaling; `expected_s` are GPU-seconds of a slot of models without a measured cost.

        Each listed signature has a load, and for each model all its others have one. Paused jobs do not count.
        """
        pauses, sample = await PauseControls(self._client).all(), BacklogSample(self._client)
        queued = await sample.queued_jobs()
        all_tenants = bool(pauses.tenants) and queued.keys() <= pauses.tenants
        paused = {one.model for one in load.models if all_tenants or pauses.has_model(one.model)}
        loads = [
            replace(one, queued_slots=0, bulk_slots=0, oldest_wait_s=0.0) if one.model in paused else one
            for one in await self._signature_loads(load, expected_s)
        ]
        dated = [one for one in await sample.dated_slots() if not pauses.has_model(one.model)]
        return Backlog(loads, await sample.limited_tenants(load.models, queued, pauses.tenants), dated)

    async def _signature_loads(self, load: QueueLoad, expected_s: Mapping[str, float]) -> list[SignatureLoad]:
        costs = await self._costs([depth.signature for depth in load.depths])
        means = await self._costs([f"model|{one.model}" for one in load.models])
        by_model = {
            one.model: mean if mean.slot_s is not None else _Cost(expected_s.get(one.model), 1.0)
            for one, mean in zip(load.models, means, strict=True)
        }
        curves = await self._curves(load.depths)
        loads = [
            SignatureLoad(
                signature=depth.signature,
                model=depth.model,
                queued_slots=depth.queued_slots - depth.slots[Priority.BULK],
                bulk_slots=depth.slots[Priority.BULK],
                running_slots=depth.running_jobs,
                oldest_wait_s=(depth.oldest_age_ms or 0) / 1000,
                waiting_s=(depth.waiting_ms or 0) / 1000,
                bulk_age_s=(depth.bulk_age_ms or 0) / 1000,
                slot_s=cost.slot_s,
                rows=cost.rows,
                cost_curve=curve,
                spared_slots=sum(depth.spared_slots.values()) - depth.spared_slots.get(Priority.BULK, 0.0),
                spared_bulk_slots=depth.spared_slots.get(Priority.BULK, 0.0),
            )
            for depth, own, curve in zip(load.depths, costs, curves, strict=True)
            for cost in (own if own.slot_s is not None else by_model.get(depth.model, own),)
        ]
        return loads + [other for one in load.models if (other := _others(one, load.depths, by_model[one.model]))]

    async def _longest(self) -> list[str]:
        with translated():
            return list(await self._redis.zrange(self._keys.signatures, 0, MAX_SIGNATURES - 1, desc=True))

    async def _first_ready(self, models: Sequence[str]) -> list[str]:
        """Return the signatures that became ready first: those of the oldest jobs can have short queues."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for model in models:
                    for priority in RANKS:
                        pipe.zrange(self._keys.ready(model, priority.value), 0, _FIRST_READY - 1)
                return [signature for rows in await pipe.execute() for signature in rows]

    async def _costs(self, names: Sequence[str]) -> list[_Cost]:
        """Return the measured costs of signatures or models."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hmget(self._keys.slot_cost(name), "slot_s", "rows")
                rows = await pipe.execute()
        return [_Cost(None if slot_s is None else float(slot_s), float(rows or 1)) for slot_s, rows in rows]

    async def _curves(self, depths: Sequence[QueueDepth]) -> list[dict[int, float] | None]:
        """Return the cost curve of each signature's shape on the device that measured it last, in two round trips."""
        shapes = list(dict.fromkeys((depth.model, _shape(depth)) for depth in depths))
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for model, shape in shapes:
                    pipe.get(self._keys.cost_device(model, shape))
                measured = [(*one, device) for one, device in zip(shapes, await pipe.execute(), strict=True) if device]
        curves = await self._hashes(self._keys.cost_curve(device, model, shape) for model, shape, device in measured)
        known = {(model, shape): _curve(curve) for (model, shape, _), curve in zip(measured, curves, strict=True)}
        return [known.get((depth.model, _shape(depth))) for depth in depths]


class _Cost(NamedTuple):
    """GPU-seconds of a slot, None if not measured, in forwards of `rows` rows on average."""

    slot_s: float | None
    rows: float


def _others(total: ModelDepth, listed: Sequence[QueueDepth], cost: _Cost) -> SignatureLoad | None:
    """Return the load of a model's signatures that are not listed, at the model's mean cost; None without any."""
    same = [depth for depth in listed if depth.model == total.model]
    queued = total.queued_slots - sum(depth.queued_slots for depth in same)
    bulk = total.slots[Priority.BULK] - sum(depth.slots[Priority.BULK] for depth in same)
    running = total.running_jobs - sum(depth.running_jobs for depth in same)
    if total.signatures <= len(same) or (queued <= 0 and running <= 0):
        return None
    return SignatureLoad(
        signature=f"{total.model}: {total.signatures - len(same)} other signatures",
        model=total.model,
        queued_slots=max(0, queued - bulk),
        bulk_slots=max(0, bulk),
        running_slots=max(0, running),
        slot_s=cost.slot_s,
        rows=cost.rows,
    )


def _shape(depth: QueueDepth) -> str:
    """Return the shape part of the signature as workers store it in cost curves: without the frames of an image."""
    return depth.signature.removeprefix(f"{depth.model}:").partition(":")[0].removesuffix("x1")


def _curve(learned: Mapping[str, str]) -> dict[int, float]:
    return {int(rows): float(seconds) for rows, seconds in sorted(learned.items(), key=lambda row: int(row[0]))}


def _worker(info: str, beat: str | None) -> WorkerInfo | None:
    try:
        worker = _WORKER.validate_json(info)
    except ValidationError:
        return None
    return WorkerInfo(**{**worker.__dict__, "beat_at_ms": int(beat or 0)})
