"""Models that this worker cannot load, and those that operators order to load, unload or pin.

Jobs of a model that cannot be loaded stay queued, or fail where no other worker may serve them.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import structlog

from shared.errors import JobError, LoadPostponed, RedisUnavailable
from shared.queue import Queue, UnavailableModel, WorkerInfo
from shared.queue.maintenance.model_orders import ModelAction, ModelOrder
from shared.runtime.asyncio_tools import retry_while_unavailable
from worker.engine.engine_status import LoadFailure
from worker.engine.protocol import EngineInterface, MemoryOrder, MemoryOrders

log = structlog.get_logger()

CHECK_EVERY_S = 2.0
READ_ORDERS_EVERY_S = 0.5


class ModelAvailability:
    """Compares this worker's failed loads with what other workers may serve."""

    def __init__(self, queue: Queue, engine: EngineInterface, worker: str, models: Sequence[str]) -> None:
        self._queue = queue
        self._engine = engine
        self._worker = worker
        self._models = models
        self.retiring: frozenset[str] = frozenset()  # models of which no more jobs are claimed
        self._only_here: frozenset[str] = frozenset()

    def claimable(self) -> list[str]:
        """Return the models to claim jobs of."""
        models = [model for model in self._models if model not in self.retiring]
        return claimable_models(models, self._engine.status().unavailable_models, self._only_here)

    async def watch(self) -> None:
        """Learn which models no other worker may serve, while a load has failed permanently; until canceled."""
        while True:
            if any(failure.permanent for failure in self._engine.status().unavailable_models.values()):
                try:
                    await self._check()
                except RedisUnavailable as error:
                    log.debug("workers_unknown", error=error.message)
            await asyncio.sleep(random.uniform(0.5, 1.0) * CHECK_EVERY_S)

    async def gives_back(self, model: str, error: JobError | None) -> bool:
        """Return whether a job that ended with `error` is released: its model may be served later, or elsewhere."""
        if isinstance(error, LoadPostponed):
            return True
        if error is None or model not in self._engine.status().unavailable_models:
            return False
        await retry_while_unavailable(self._check, "workers_unknown")
        return model not in self._only_here

    async def _check(self) -> None:
        self._only_here = models_only_here(self._models, await self._queue.workers.all(), self._worker)


def claimable_models(
    models: Sequence[str], failures: Mapping[str, LoadFailure], only_here: Collection[str]
) -> list[str]:
    """Return the models to claim jobs of: not those that may be loaded later, nor those left to other workers.

    Jobs of a model that can be loaded nowhere are claimed, to fail with the reason.
    """
    permanent = {model for model, failure in failures.items() if failure.permanent and model in only_here}
    return [model for model in models if model not in failures or model in permanent]


def models_only_here(models: Iterable[str], workers: Iterable[WorkerInfo], worker: str) -> frozenset[str]:
    """Return the models that no live worker but `worker` may serve."""
    others = [one for one in workers if one.id != worker]
    return frozenset(model for model in models if not any(other.may_serve(model) for other in others))


def unavailable_models(failures: Mapping[str, LoadFailure], now_s: float) -> dict[str, UnavailableModel]:
    """Return the failed loads for the worker's record."""
    return {
        model: UnavailableModel(one.reason, one.permanent, round(max(0.0, one.retry_at_s - now_s), 1))
        for model, one in failures.items()
    }


class ModelOrderReader:
    """Passes operators' orders on to the engine."""

    def __init__(self, queue: Queue, engine: EngineInterface, worker: Callable[[], WorkerInfo]) -> None:
        self._queue = queue
        self._engine = engine
        self._worker = worker
        self._passed_on = MemoryOrders()

    async def read(self) -> None:
        """Read the orders once; without Redis the last ones stay."""
        try:
            orders = memory_orders(await self._queue.model_orders.all(), self._worker())
        except RedisUnavailable as error:
            log.debug("model_orders_unknown", error=error.message)
            return
        if orders != self._passed_on:
            self._passed_on = orders
            self._engine.order_models(orders)

    async def watch(self) -> None:
        """Read the orders until canceled."""
        while True:
            await asyncio.sleep(random.uniform(0.75, 1.0) * READ_ORDERS_EVERY_S)
            await self.read()


def memory_orders(orders: Iterable[ModelOrder], worker: WorkerInfo) -> MemoryOrders:
    """Return what `orders` want of the models of a worker. A pin counts for as long as it is there."""
    own = sorted(
        (one for one in orders if one.is_for(worker) and one.model in worker.models), key=lambda one: one.number
    )
    pinned = dict.fromkeys(one.model for one in own if one.action is ModelAction.PIN)
    last = {one.model: one for one in own if one.action is not ModelAction.PIN}
    memory = (MemoryOrder(one.model, one.action is ModelAction.UNLOAD, one.number) for one in last.values())
    return MemoryOrders(tuple(pinned), tuple(memory))
