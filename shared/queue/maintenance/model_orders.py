"""Model orders: which models operators want in the memory of which workers. Workers follow within a second.

The last order for a model on some workers replaces the one before. Orders outlive workers and API processes: a worker
that starts follows them, pins and loads first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import TypeAdapter, ValidationError

from shared.errors import Conflict
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.records import WorkerInfo
from shared.queue.transactions import Transaction

MAX_ORDERS = 1000
GIB = 2**30


class ModelAction(StrEnum):
    """`load` once, free (`unload`), or load and never evict (`pin`)."""

    LOAD = "load"
    UNLOAD = "unload"
    PIN = "pin"


@dataclass(frozen=True)
class ModelOrder:
    """One order, for a worker, a worker pool or all workers; `key_id` is that of the API key, if any."""

    id: str
    model: str
    action: ModelAction
    ordered_at_ms: int
    worker_pool: str | None = None
    worker: str | None = None
    key_id: str | None = None

    @property
    def scope(self) -> str:
        """Return the workers it is for, as a part of its field in Redis."""
        if self.worker is not None:
            return f"worker:{self.worker}"
        return "all" if self.worker_pool is None else f"pool:{self.worker_pool}"

    @property
    def number(self) -> tuple[int, str]:
        """Return what is larger for a later order."""
        return self.ordered_at_ms, self.id

    def is_for(self, worker: WorkerInfo) -> bool:
        """Return whether a worker follows it."""
        return self.worker in (None, worker.id) and self.worker_pool in (None, worker.worker_pool)


class ModelOrders(QueueComponent):
    """The orders of all models."""

    async def put(self, order: ModelOrder) -> None:
        """Record an order; raises `Conflict` at `MAX_ORDERS`. Orders for workers that have ended are forgotten."""
        row = _ORDER.dump_json(order).decode()
        name, index = f"{order.scope}|{order.model}", self._keys.model_orders

        async def attempt(transaction: Transaction) -> None:
            (fields,) = await transaction.read(("HKEYS", index))
            of_workers = [field for field in fields if field.startswith("worker:")]
            workers = (field.removeprefix("worker:").partition("|")[0] for field in of_workers)
            beats = await transaction.read(
                *(("ZSCORE", self._keys.workers, worker) for worker in workers), fenced=False
            )
            ended = [field for field, beat in zip(of_workers, beats, strict=True) if beat is None]
            if ended:
                transaction.write("HDEL", index, *ended)
            if name not in fields and len(fields) - len(ended) >= MAX_ORDERS:
                raise Conflict(f"too many model orders: at most {MAX_ORDERS}; order for all workers instead of some")
            transaction.write("HSET", index, name, row)

        await self._transact(attempt, when_full=True)

    async def end(self, order: ModelOrder) -> None:
        """Forget an order; workers keep what they have."""
        with translated():
            await self._redis.hdel(self._keys.model_orders, f"{order.scope}|{order.model}")

    async def all(self) -> list[ModelOrder]:
        """Return all orders, the earliest first."""
        with translated():
            rows = await self._redis.hgetall(self._keys.model_orders)
        return sorted(filter(None, map(_read, rows.values())), key=lambda order: order.number)


def pins_in_the_way(orders: Iterable[ModelOrder], new: ModelOrder, workers: Sequence[WorkerInfo]) -> list[ModelOrder]:
    """Return the pins of the model on workers that `new` is for."""
    pools = {worker.id: worker.worker_pool for worker in workers}
    return [
        one for one in orders if one.model == new.model and one.action is ModelAction.PIN and _overlap(one, new, pools)
    ]


def _overlap(one: ModelOrder, other: ModelOrder, pools: Mapping[str, str]) -> bool:
    if "all" in (one.scope, other.scope):
        return True
    if one.worker is not None and other.worker is not None:
        return one.worker == other.worker
    own, others = (order.worker_pool or pools.get(order.worker or "") for order in (one, other))
    return own == others


def pins_too_large(orders: Sequence[ModelOrder], new: ModelOrder, workers: Sequence[WorkerInfo]) -> str | None:
    """Return why the model of `new` cannot be pinned next to the others; None if it can, as far as sizes are known."""
    for worker in workers:
        if not new.is_for(worker) or new.model not in worker.models:
            continue
        pins = [one.model for one in orders if one.action is ModelAction.PIN and one.is_for(worker)]
        models = [model for model in dict.fromkeys((*pins, new.model)) if model in worker.models]
        sizes = {model: worker.model_bytes[model] for model in models if model in worker.model_bytes}
        if len(models) > 1 and sum(sizes.values()) > worker.models_limit_bytes > 0:
            listed = ", ".join(f"{model} {nbytes / GIB:.3g} GiB" for model, nbytes in sizes.items())
            return (
                f"pinned models do not fit into the memory of worker {worker.id}: {listed}, and models can take "
                f"{worker.models_limit_bytes / GIB:.3g} GiB; unpin one, or name another worker or worker pool"
            )
    return None


_ORDER = TypeAdapter(ModelOrder)


def _read(row: str) -> ModelOrder | None:
    try:
        return _ORDER.validate_json(row)
    except ValidationError:
        return None
