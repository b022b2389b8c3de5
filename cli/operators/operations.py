"""Commands of operators: pause, resume, pauses, actions and curves."""

from typing import Annotated

import typer

from cli.client_options import Json, Key, Url, connected, name_option
from fusequeue import CostCurve, OperatorAction, Pause

OfModel = Annotated[str | None, typer.Option("--model", help="Only this model.", callback=name_option)]
OfTenant = Annotated[str | None, typer.Option("--tenant", help="Only this tenant.", callback=name_option)]
All = Annotated[bool, typer.Option("--all", help="Everything.")]
Reason = Annotated[str, typer.Option(help="Shown to other operators.", callback=name_option)]
Limit = Annotated[int, typer.Option(min=1, help="How many, newest first.")]


def pause(
    model: OfModel = None,
    tenant: OfTenant = None,
    everything: All = False,
    reason: Reason = "",
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Start no job of a model, of a tenant, or at all: new jobs wait, running ones run on."""
    _require_one(model, tenant, everything)
    with connected(url, api_key, as_json) as (client, console):
        made = client.operations.pause(model=model, tenant=tenant, everything=everything, reason=reason)
        console.record(made, ((_name(made), "paused"),))


def resume(
    model: OfModel = None,
    tenant: OfTenant = None,
    everything: All = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """End a pause."""
    _require_one(model, tenant, everything)
    with connected(url, api_key, as_json) as (client, console):
        client.operations.resume(model=model, tenant=tenant, everything=everything)
        name = model or tenant or "everything"
        console.record({"name": name, "resumed": True}, ((name, "resumed"),))


def pauses(url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List what is paused."""
    with connected(url, api_key, as_json) as (client, console):
        console.table(client.operations.pauses(), ("paused", "since", "key", "reason"), _pause_row)


def actions(limit: Limit = 20, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List what operators did, newest first."""
    with connected(url, api_key, as_json) as (client, console):
        columns = ("at", "action", "target", "count", "key", "detail")
        console.table(client.operations.actions(limit=limit), columns, _action_row)


def curves(of: OfModel = None, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List the batch cost curves that workers measured: seconds of a forward by its rows."""
    with connected(url, api_key, as_json) as (client, console):
        columns = ("model", "device", "shape", "efficient rows", "seconds by rows")
        console.table(client.operations.cost_curves(model=of), columns, _curve_row)


def _curve_row(curve: CostCurve) -> tuple[object, ...]:
    seconds = ", ".join(f"{point.rows}: {point.seconds:.4g}" for point in curve.points)
    return curve.model, curve.device, curve.shape, curve.efficient_rows, seconds


def _require_one(model: str | None, tenant: str | None, everything: bool) -> None:
    if [bool(model), bool(tenant), everything].count(True) != 1:
        raise typer.BadParameter("name one of: --model, --tenant, --all")


def _name(pause: Pause) -> str:
    return "everything" if pause.kind == "all" else f"{pause.kind} {pause.name}"


def _pause_row(pause: Pause) -> tuple[object, ...]:
    return _name(pause), f"{pause.paused_at:%Y-%m-%d %H:%M:%S}", pause.key_id or "", pause.reason


def _action_row(action: OperatorAction) -> tuple[object, ...]:
    at = f"{action.at:%Y-%m-%d %H:%M:%S}"
    return at, action.action, action.target, action.count, action.key_id or "", action.detail
