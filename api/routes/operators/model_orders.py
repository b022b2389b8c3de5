"""Routes by which operators load, unload and pin models on workers."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from api import strict_json
from api.auth import Caller
from api.context import CallerDep, Services, ServicesDep
from api.http.lists import known_parameters
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import problems
from api.jobs.job_object import iso
from api.jobs.request import validated
from shared.errors import Conflict, NotFound
from shared.queue import WorkerInfo
from shared.queue.maintenance.actions import Action
from shared.queue.maintenance.model_orders import ModelAction, ModelOrder, pins_in_the_way, pins_too_large
from shared.runtime.clock import new_id

router = APIRouter(prefix="/v1", tags=["operations"])

PoolName = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")]


class OrderTarget(BaseModel):
    """The workers of an order; all that have the model in their models file, if none are named."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worker_pool: PoolName | None = Field(None, description="Only workers with this FUSEQUEUE_WORKER_POOL.")
    worker: str | None = Field(None, max_length=200, description="Only this worker, until it ends.")

    @model_validator(mode="after")
    def _one_of_both(self) -> "OrderTarget":
        if self.worker is not None and self.worker_pool is not None:
            raise ValueError("worker and worker_pool exclude each other")
        return self


class ModelOnWorker(BaseModel):
    """Where a worker has the model now."""

    worker: str
    worker_pool: str
    state: Literal["loaded", "loading", "kept", "failed", "not_loaded"] = Field(
        description="`loaded` in device memory, `kept` in CPU memory."
    )
    reason: str | None = Field(description="Why its last load failed.")


class ModelOrderObject(BaseModel):
    """What operators want of a model, and where it is now. Workers follow within a second, between batches."""

    object: Literal["model_order"] = "model_order"
    model: str
    action: Literal["load", "unload", "pin", "unpin"]
    worker_pool: str | None
    worker: str | None
    ordered_at: str
    key_id: str | None = Field(description="The API key that ordered it.")
    workers: list[ModelOnWorker] = Field(description="The live workers that it is for.")


class ModelOrderList(BaseModel):
    """All orders, the earliest first."""

    object: Literal["list"] = "list"
    data: list[ModelOrderObject]


_TARGET: dict[str, Any] = {
    "requestBody": {"content": {"application/json": {"schema": OrderTarget.model_json_schema()}}}
}
_ERRORS = problems(400, 404, 409, 415, 422, 503)


@router.get("/model-orders", responses=problems(422, 503), dependencies=[known_parameters()])
async def list_model_orders(services: ServicesDep) -> ModelOrderList:
    """List the last order for each model and worker pool, or worker."""
    workers = await services.queue.workers.all()
    return ModelOrderList(data=[_object(order, workers) for order in await services.queue.model_orders.all()])


@router.post("/models/{model:path}:load", status_code=202, openapi_extra=_TARGET, responses=_ERRORS)
async def load_model(model: str, services: ServicesDep, caller: CallerDep, request: Request) -> ModelOrderObject:
    """Load a model before jobs ask for it. Workers without room evict others, after their running jobs."""
    return await _order(services, caller, model, ModelAction.LOAD, await _target(request))


@router.post("/models/{model:path}:unload", status_code=202, openapi_extra=_TARGET, responses=_ERRORS)
async def unload_model(model: str, services: ServicesDep, caller: CallerDep, request: Request) -> ModelOrderObject:
    """Free a model in device and CPU memory, after its running jobs. A queued job of it loads it again."""
    return await _order(services, caller, model, ModelAction.UNLOAD, await _target(request))


@router.post("/models/{model:path}:pin", status_code=202, openapi_extra=_TARGET, responses=_ERRORS)
async def pin_model(model: str, services: ServicesDep, caller: CallerDep, request: Request) -> ModelOrderObject:
    """Load a model and keep it in device memory until `:unpin`, also on workers that start later."""
    return await _order(services, caller, model, ModelAction.PIN, await _target(request))


@router.post("/models/{model:path}:unpin", status_code=202, openapi_extra=_TARGET, responses=_ERRORS)
async def unpin_model(model: str, services: ServicesDep, caller: CallerDep, request: Request) -> ModelOrderObject:
    """End a pin, named as it was set. The model stays until another one needs its memory."""
    queue, target, model = services.queue, await _target(request), services.catalog.id_of(model)
    orders, workers = await queue.model_orders.all(), await queue.workers.all()
    asked = ModelOrder("", model, ModelAction.PIN, 0, target.worker_pool, target.worker)
    pins = [one for one in orders if one.model == model and one.action is ModelAction.PIN]
    ended = next((one for one in pins if one.scope == asked.scope), None)
    if ended is None:
        known = f"; it is pinned {' and '.join(map(_where, pins))}" if pins else ""
        raise NotFound(f"model {model[:200]!r} is not pinned {_where(asked)}{known}", param="model")
    await queue.model_orders.end(ended)
    await queue.actions.record(Action("unpin", f"model {model}", caller.key_id or "", detail=_where(ended)))
    return _object(ended, workers).model_copy(update={"action": "unpin"})


async def _target(request: Request) -> OrderTarget:
    """Return the workers named in a body, which can be left out."""
    body = await request.body()
    if not body:
        return OrderTarget(worker_pool=None, worker=None)
    require_type(request, JSON_TYPES)
    return validated(OrderTarget, strict_json.decode(body))


async def _order(
    services: Services, caller: Caller, model: str, action: ModelAction, target: OrderTarget
) -> ModelOrderObject:
    queue, model = services.queue, services.catalog.get(model).id
    orders, workers = await queue.model_orders.all(), await queue.workers.all()
    if target.worker is not None and all(worker.id != target.worker for worker in workers):
        raise NotFound(f"no worker {target.worker!r} is alive; `GET /v1/workers` lists them", param="worker")
    order = ModelOrder(
        new_id("order"), model, action, await queue.now_ms(), target.worker_pool, target.worker, caller.key_id
    )
    pins = pins_in_the_way(orders, order, workers)
    if action is ModelAction.UNLOAD and pins:
        raise Conflict(f"model {model!r} is pinned {' and '.join(map(_where, pins))}; unpin it first")
    if action is ModelAction.PIN and (too_large := pins_too_large(orders, order, workers)):
        raise Conflict(too_large)
    if action is ModelAction.LOAD and (pinned := next((pin for pin in pins if pin.scope == order.scope), None)):
        return _object(pinned, workers)  # it is loaded anyway
    await queue.model_orders.put(order)
    await queue.actions.record(Action(action.value, f"model {model}", caller.key_id or "", detail=_where(order)))
    return _object(order, workers)


def _where(order: ModelOrder) -> str:
    if order.worker is not None:
        return f"on worker {order.worker}"
    return "on all workers" if order.worker_pool is None else f"in worker pool {order.worker_pool}"


def _object(order: ModelOrder, workers: Sequence[WorkerInfo]) -> ModelOrderObject:
    return ModelOrderObject(
        model=order.model,
        action=order.action.value,
        worker_pool=order.worker_pool,
        worker=order.worker,
        ordered_at=iso(order.ordered_at_ms) or "",
        key_id=order.key_id,
        workers=[
            ModelOnWorker(
                worker=worker.id,
                worker_pool=worker.worker_pool,
                state=worker.memory_state(order.model),
                reason=worker.unavailable[order.model].reason if order.model in worker.unavailable else None,
            )
            for worker in workers
            if order.is_for(worker) and order.model in worker.models
        ],
    )
