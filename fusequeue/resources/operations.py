"""Pauses, model orders, tenants and the log of what operators did; these need a key with the scope `admin`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Literal, TypeAlias, Unpack

from pydantic import SkipValidation

from fusequeue.arguments import path_of
from fusequeue.errors import InvalidArgument
from fusequeue.resources.tenants import LimitChanges, OwnTenantLimits, Tenant
from fusequeue.response_types import Resource
from fusequeue.service import MemoryState, Model
from fusequeue.transport import Transport

PATH = "/v1/pauses"
PauseKind: TypeAlias = Literal["all", "model", "tenant"]


class Pause(Resource):
    """What is paused: everything, or the model or tenant `name`."""

    kind: SkipValidation[PauseKind]
    name: str
    reason: str = ""
    paused_at: datetime
    key_id: str | None = None


class OperatorAction(Resource):
    """What an operator did, and to how many jobs or entries."""

    id: str
    at: datetime
    action: str
    target: str
    count: int = 1
    detail: str = ""
    key_id: str | None = None


class ModelOnWorker(Resource):
    """Where a worker has the model of an order; `reason` is why its last load failed."""

    worker: str
    worker_pool: str
    state: SkipValidation[MemoryState]
    reason: str | None = None


class ModelOrder(Resource):
    """What operators want of a model on a worker, a worker pool or all `workers`."""

    model: str
    action: SkipValidation[Literal["load", "unload", "pin", "unpin"]]
    worker_pool: str | None = None
    worker: str | None = None
    ordered_at: datetime
    key_id: str | None = None
    workers: tuple[ModelOnWorker, ...] = ()


class CostPoint(Resource):
    """Seconds of a forward with `rows` images."""

    rows: int
    seconds: float


class CostCurve(Resource):
    """Seconds of a forward by its rows, of one shape on one kind of device."""

    model: str
    device: str
    shape: str
    points: list[CostPoint]
    efficient_rows: int
    measured_at: datetime


class AsyncOperations:
    """What operators do: `client.operations`."""

    def __init__(self, http: Transport) -> None:
        self._http = http

    async def pause(
        self,
        *,
        model: Model | str | None = None,
        tenant: str | None = None,
        everything: bool = False,
        reason: str = "",
    ) -> Pause:
        """Start no job of a model, of a tenant, or at all; running jobs run on, and new ones wait."""
        path = _path(model, tenant, everything)
        return await self._http.read(Pause, "PUT", path, json={"reason": reason})

    async def resume(
        self, *, model: Model | str | None = None, tenant: str | None = None, everything: bool = False
    ) -> None:
        """End a pause."""
        await self._http.send("DELETE", _path(model, tenant, everything), removes=True)

    async def pauses(self) -> list[Pause]:
        """Return what is paused."""
        return await self._http.listed(Pause, PATH)

    async def load_model(
        self, model: Model | str, *, worker_pool: str | None = None, worker: str | None = None
    ) -> ModelOrder:
        """Load a model before jobs ask for it; workers without room evict others, after their running jobs."""
        return await self._order(model, "load", worker_pool, worker)

    async def unload_model(
        self, model: Model | str, *, worker_pool: str | None = None, worker: str | None = None
    ) -> ModelOrder:
        """Free a model after its running jobs; a queued job of it loads it again."""
        return await self._order(model, "unload", worker_pool, worker)

    async def pin_model(
        self, model: Model | str, *, worker_pool: str | None = None, worker: str | None = None
    ) -> ModelOrder:
        """Load a model and keep it in device memory until `unpin_model`, also on workers that start later."""
        return await self._order(model, "pin", worker_pool, worker)

    async def unpin_model(
        self, model: Model | str, *, worker_pool: str | None = None, worker: str | None = None
    ) -> ModelOrder:
        """End a pin, named as it was set; the model stays until another one needs its memory."""
        return await self._order(model, "unpin", worker_pool, worker)

    async def model_orders(self) -> list[ModelOrder]:
        """Return the last order for each model and worker pool, or worker."""
        return await self._http.listed(ModelOrder, "/v1/model-orders")

    async def _order(self, model: Model | str, action: str, worker_pool: str | None, worker: str | None) -> ModelOrder:
        named = {"worker_pool": worker_pool, "worker": worker}
        target = {name: value for name, value in named.items() if value is not None}
        return await self._http.read(ModelOrder, "POST", path_of("/v1/models", model, f":{action}"), json=target)

    def actions(self, *, limit: int | None = None) -> AsyncGenerator[OperatorAction]:
        """Yield what operators did, newest first, up to `limit`."""
        return self._http.pages(OperatorAction, "/v1/actions", limit)

    def tenants(self, *, name: str | None = None, days: int = 1, limit: int | None = None) -> AsyncGenerator[Tenant]:
        """Yield the tenants by name, those that begin with `name`, up to `limit`; `days` of usage end today (UTC)."""
        return self._http.pages(Tenant, "/v1/tenants", limit, {"name": name, "days": days})

    async def change_limits(self, tenant: Tenant | str, **limits: Unpack[LimitChanges]) -> OwnTenantLimits:
        """Change limits of a tenant, which can be a new one; they count for its next request.

        What is left out stays, and None restores the limit of the settings.
        """
        return await self._http.read(OwnTenantLimits, "PATCH", path_of("/v1/tenants", tenant, "/limits"), json=limits)

    async def cost_curves(self, *, model: Model | str | None = None) -> list[CostCurve]:
        """Return what forwards cost by their rows, of one model or of all."""
        params = {} if model is None else {"model": getattr(model, "id", model)}
        return await self._http.listed(CostCurve, "/v1/cost-curves", params=params)


def _path(model: Model | str | None, tenant: str | None, everything: bool) -> str:
    if [model is not None, tenant is not None, everything].count(True) != 1:
        raise InvalidArgument("name one of: model, tenant, everything=True")
    if model is not None:
        return path_of(f"{PATH}/models", model)
    return f"{PATH}/all" if tenant is None else path_of(f"{PATH}/tenants", tenant)
