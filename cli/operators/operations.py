"""Commands of operators: pause, resume, pauses, actions and curves; pauses of jobs; and what jobs have used."""

import csv
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, cast

import typer

from cli.client_options import CommandConsole, Json, Key, Url, connected, for_each, ids_option, name_option
from fusequeue import CostCurve, Job, OperatorAction, Pause, UsageRow
from fusequeue.resources.usage import UsageGroup

JobIds = Annotated[list[str] | None, typer.Argument(help="Jobs, queued or running.", callback=ids_option)]
OfModel = Annotated[str | None, typer.Option("--model", help="Only this model.", callback=name_option)]
OfTenant = Annotated[str | None, typer.Option("--tenant", help="Only this tenant.", callback=name_option)]
All = Annotated[bool, typer.Option("--all", help="Everything.")]
Reason = Annotated[str, typer.Option(help="Shown to other operators.", callback=name_option)]
Limit = Annotated[int, typer.Option(min=1, help="How many, newest first.")]
From = Annotated[str | None, typer.Option("--from", help="First day (UTC), such as 2026-01-31.", callback=name_option)]
To = Annotated[str | None, typer.Option("--to", help="Last day, included. Default: today.", callback=name_option)]
By = Annotated[
    list[str] | None,
    typer.Option("--by", help="Divide by day, tenant or model; repeatable. Default: all three.", callback=name_option),
]
AllTenants = Annotated[bool, typer.Option("--all-tenants", help="Of every tenant; for keys with the scope admin.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV (RFC 4180), with a line of column names.")]
USAGE_COLUMNS = (
    *("day", "tenant", "model", "device_seconds", "images", "videos", "output_bytes", "steps", "skipped_steps"),
    *("succeeded", "failed", "canceled", "expired"),
)
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def pause(
    job_ids: JobIds = None,
    model: OfModel = None,
    tenant: OfTenant = None,
    everything: All = False,
    reason: Reason = "",
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Pause jobs; or, as an operator, start no job of a model, of a tenant, or at all."""
    _require_one(job_ids, model, tenant, everything)
    with connected(url, api_key, as_json) as (client, console):
        if job_ids:
            return _change_each(console, job_ids, client.pause)
        made = client.operations.pause(model=model, tenant=tenant, everything=everything, reason=reason)
        console.record(made, ((_name(made), "paused"),))


def resume(
    job_ids: JobIds = None,
    model: OfModel = None,
    tenant: OfTenant = None,
    everything: All = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """End the pauses of jobs, or one of a model, of a tenant, or of everything."""
    _require_one(job_ids, model, tenant, everything)
    with connected(url, api_key, as_json) as (client, console):
        if job_ids:
            return _change_each(console, job_ids, client.resume)
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


def usage(
    first_day: From = None,
    last_day: To = None,
    tenant: OfTenant = None,
    all_tenants: AllTenants = False,
    model: OfModel = None,
    by: By = None,
    as_csv: Csv = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """List what jobs have used, by day, tenant and model, in the last 30 days."""
    if as_csv and as_json:
        raise typer.BadParameter("it excludes --json", param_hint="--csv")
    if tenant and all_tenants:
        raise typer.BadParameter("it excludes --tenant", param_hint="--all-tenants")
    with connected(url, api_key, as_json) as (client, console):
        rows = client.usage(
            first_day=first_day,
            last_day=last_day,
            tenant="*" if all_tenants else tenant,
            model=model,
            group_by=cast("list[UsageGroup]", by) or ("day", "tenant", "model"),  # the service names what is wrong
        )
        if as_csv:
            write_csv(rows)
        else:
            console.table(rows, [column.replace("_", " ") for column in USAGE_COLUMNS], usage_cells)


def write_csv(rows: Iterable[UsageRow]) -> None:
    """Write rows to stdout as they arrive. A spreadsheet takes no name for a formula."""
    writer = csv.writer(sys.stdout, lineterminator="\r\n")
    writer.writerow(USAGE_COLUMNS)
    for row in rows:
        cells = usage_cells(row)
        writer.writerow([f"'{cell}" if str(cell).startswith(FORMULA_STARTS) else cell for cell in cells])


def usage_cells(row: UsageRow) -> tuple[object, ...]:
    """Return the values of `USAGE_COLUMNS`."""
    return tuple(getattr(row if name in UsageRow.model_fields else row.jobs, name) for name in USAGE_COLUMNS)


def _curve_row(curve: CostCurve) -> tuple[object, ...]:
    seconds = ", ".join(f"{point.rows}: {point.seconds:.4g}" for point in curve.points)
    return curve.model, curve.device, curve.shape, curve.efficient_rows, seconds


def _require_one(job_ids: list[str] | None, model: str | None, tenant: str | None, everything: bool) -> None:
    if [bool(job_ids), bool(model), bool(tenant), everything].count(True) != 1:
        raise typer.BadParameter("name jobs, or one of: --model, --tenant, --all")


def _change_each(console: CommandConsole, job_ids: list[str], change: Callable[[str], Job]) -> None:
    def change_one(job_id: str) -> None:
        job = change(job_id)
        console.record(job, ((job.id, "paused" if job.paused_at else job.status),))

    for_each(job_ids, change_one)


def _name(pause: Pause) -> str:
    return "everything" if pause.kind == "all" else f"{pause.kind} {pause.name}"


def _pause_row(pause: Pause) -> tuple[object, ...]:
    return _name(pause), f"{pause.paused_at:%Y-%m-%d %H:%M:%S}", pause.key_id or "", pause.reason


def _action_row(action: OperatorAction) -> tuple[object, ...]:
    at = f"{action.at:%Y-%m-%d %H:%M:%S}"
    return at, action.action, action.target, action.count, action.key_id or "", action.detail
