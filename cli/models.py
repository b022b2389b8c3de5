"""Commands of models: list them; load, unload, pin and unpin them on workers."""

import time
from collections.abc import Callable
from typing import Annotated

import typer

from cli.client_options import CommandConsole, Exit, Json, Key, Url, connected, name_option
from cli.messages import print_error
from fusequeue import Client, Model, ModelOrder, WorkerInfo

models = typer.Typer(invoke_without_command=True)

POLL_S = 0.5
STALE_S = 3.0  # how old the last heartbeat's state can be, with the time in which workers read orders

ModelId = Annotated[str, typer.Argument(help="A model of `fusequeue models`.", callback=name_option)]
Pool = Annotated[
    str | None, typer.Option("--pool", help="Only workers with this FUSEQUEUE_WORKER_POOL.", callback=name_option)
]
Worker = Annotated[str | None, typer.Option("--worker", help="Only this worker, until it ends.", callback=name_option)]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the workers have followed.")]
MODEL_COLUMNS = ("id", "size", "steps", "max batch", "workers", "tasks")
Timeout = Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait.")]


@models.callback()
def list_models(context: typer.Context, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List the models of the service; load, unload, pin and unpin them on workers."""
    if context.invoked_subcommand is None:
        with connected(url, api_key, as_json) as (client, console):
            console.table(client.models(), MODEL_COLUMNS, _model_row)


@models.command()
def orders(url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List what operators ordered, and where the models are."""
    with connected(url, api_key, as_json) as (client, console):
        columns = ("model", "order", "for", "at", "key", "workers")
        console.table(client.operations.model_orders(), columns, _order_row)


@models.command()
def load(
    model: ModelId,
    pool: Pool = None,
    worker: Worker = None,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Load a model before jobs ask for it; workers without room evict others."""
    with connected(url, api_key, as_json) as (client, console):
        made = client.operations.load_model(model, worker_pool=pool, worker=worker)
        _report(client, console, made, timeout if wait else None)


@models.command()
def unload(
    model: ModelId,
    pool: Pool = None,
    worker: Worker = None,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Free a model after its running jobs; a queued job of it loads it again."""
    with connected(url, api_key, as_json) as (client, console):
        made = client.operations.unload_model(model, worker_pool=pool, worker=worker)
        _report(client, console, made, timeout if wait else None)


@models.command()
def pin(
    model: ModelId,
    pool: Pool = None,
    worker: Worker = None,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Load a model and keep it in device memory until `unpin`, also on workers that start later."""
    with connected(url, api_key, as_json) as (client, console):
        made = client.operations.pin_model(model, worker_pool=pool, worker=worker)
        _report(client, console, made, timeout if wait else None)


@models.command()
def unpin(
    model: ModelId,
    pool: Pool = None,
    worker: Worker = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """End a pin, named as it was set."""
    with connected(url, api_key, as_json) as (client, console):
        _report(client, console, client.operations.unpin_model(model, worker_pool=pool, worker=worker), None)


def _report(client: Client, console: CommandConsole, order: ModelOrder, wait_s: float | None) -> None:
    """Print an order, once the workers that it is for have followed it."""
    if wait_s is None:
        console.record(order, ((order.model, order.action), ("workers", _states(order))))
        return
    workers = _wait(lambda: _worker_states(client.workers(), order), order.action == "unload", wait_s)
    followed = [{"worker": worker, "followed": True} for worker in workers]
    console.record({**order.model_dump(mode="json"), "workers": followed}, ((order.model, f"{order.action}: done"),))


def _wait(read: Callable[[], dict[str, tuple[str, str]]], unloads: bool, wait_s: float) -> list[str]:
    """Wait for the workers of an order and return the live ones.

    Exits with `FAILED` if a worker cannot load the model or none is left to load it, with `TIMEOUT` after `wait_s`.
    """
    started = time.monotonic()
    while True:
        states, waited_s = read(), time.monotonic() - started
        in_memory = {worker for worker, (state, _) in states.items() if state in ("loaded", "loading", "kept")}
        left = in_memory if unloads else {worker for worker, (state, _) in states.items() if state != "loaded"}
        if not states and not unloads:
            print_error("no live worker for this order; `fusequeue workers` lists the live ones")
            raise typer.Exit(Exit.FAILED)
        if not left:
            return sorted(states)
        reasons = [f"{worker}: {reason}" for worker, (state, reason) in states.items() if state == "failed"]
        if reasons and not unloads and waited_s > STALE_S:
            print_error("; ".join(reasons))
            raise typer.Exit(Exit.FAILED)
        if waited_s > wait_s:
            print_error(f"not within {wait_s:g} s: {', '.join(sorted(left))}")
            raise typer.Exit(Exit.TIMEOUT)
        time.sleep(POLL_S)


def _worker_states(workers: list[WorkerInfo], order: ModelOrder) -> dict[str, tuple[str, str]]:
    """Return the state of the model on the live workers of an order, and why its last load failed."""
    names = {one.worker for one in order.workers}
    return {
        worker.id: (worker.memory_state(order.model), failure.reason if failure else "")
        for worker in workers
        if worker.id in names
        for failure in (worker.unavailable.get(order.model),)
    }


def _states(order: ModelOrder) -> list[str]:
    return [f"{one.worker} {one.state.replace('_', ' ')}" for one in order.workers]


def _order_row(order: ModelOrder) -> tuple[object, ...]:
    where = order.worker or (f"pool {order.worker_pool}" if order.worker_pool else "all workers")
    at = f"{order.ordered_at:%Y-%m-%d %H:%M:%S}"
    return order.model, order.action, where, at, order.key_id or "", _states(order)


def _model_row(model: Model) -> tuple[object, ...]:
    size = f"{model.defaults.width}x{model.defaults.height}"
    if all("audio" in task for task in model.tasks):
        size = f"{model.defaults.duration_s or model.limits.max_duration_s:g} s"
    counts = {} if model.workers is None else model.workers.model_dump()
    workers = [f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count]
    return model.id, size, model.defaults.steps, model.max_batch, workers, model.tasks
