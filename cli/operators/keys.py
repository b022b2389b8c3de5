"""`fusequeue keys` and `fusequeue tenants`: API keys and tenant limits, straight in Redis.

Access to the settings of a deployment is enough, so creating the first key needs no key.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.client_options import CommandConsole, Exit, Json
from cli.messages import print_error
from cli.up import environment
from shared import auth
from shared.config import settings
from shared.durations import duration_s
from shared.errors import ConfigurationError, FusequeueError, InvalidRequest, NotFound, RedisUnavailable, Unavailable

if TYPE_CHECKING:
    from shared.queue import Queue

keys = typer.Typer(invoke_without_command=True)
tenants = typer.Typer(invoke_without_command=True)

TIMEOUT_S = 20.0
MAX_LIFETIME_S = 100 * 366 * 86_400
DataDir = Annotated[Path, typer.Option(help="Folder of a running `fusequeue up`; FUSEQUEUE_REDIS_URL overrides it.")]
KeyName = Annotated[str, typer.Argument(help="Id or prefix of the key, or the key itself.")]
TenantFilter = Annotated[str | None, typer.Option(help="Only keys of this tenant.")]
Limit = Annotated[str | None, typer.Option(help="A number, or `default` for that of the settings.")]
DATA = Path("data")


@keys.callback()
def list_keys(
    context: typer.Context, tenant: TenantFilter = None, data_dir: DataDir = DATA, as_json: Json = False
) -> None:
    """List API keys, with the time of their last use; create and revoke them."""

    async def run(queue: Queue) -> list[dict[str, Any]]:
        return [_key_row(key) for key in await queue.api_keys.all() if tenant in (None, key.tenant)]

    if context.invoked_subcommand is None:
        _print(_run(run, data_dir), as_json)


@keys.command()
def create(
    tenant: Annotated[str, typer.Option(help="Tenant whose jobs the key can access.")] = auth.DEFAULT_TENANT,
    scopes: Annotated[str, typer.Option(help=f"Of {', '.join(auth.Scope)}.")] = "jobs:read,jobs:write",
    name: Annotated[str, typer.Option(help="A note.")] = "",
    expires: Annotated[str | None, typer.Option(help="Such as 90d, 12h, 30m. Unset: never.")] = None,
    data_dir: DataDir = DATA,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the key.")] = False,
) -> None:
    """Create a key and print it; it is shown once. Once a key exists, the API requires keys."""
    if quiet and as_json:
        raise typer.BadParameter("it excludes --json", param_hint="--quiet")

    async def run(queue: Queue) -> dict[str, Any]:
        owner, granted = auth.tenant_name(tenant), auth.parse_scopes(scopes)
        lives_s = None if expires is None else _lifetime_s(expires)
        token, key = await queue.api_keys.create(owner, granted, name=name, lives_s=lives_s)
        return {"key": token, **_key_row(key)}

    row = _run(run, data_dir)
    if as_json:
        _print(row, as_json)
    else:
        print(row["key"], flush=True)  # alone on stdout, so that a script can capture it
    if not (as_json or quiet):
        granted, expiry = ", ".join(row["scopes"]), row["expires_at"] or "never"
        print(f"shown this once; tenant {row['tenant']}, scopes {granted}, expires {expiry}", file=sys.stderr)
    asyncio.run(_mark_keys(data_dir))


@keys.command()
def revoke(key: KeyName, data_dir: DataDir = DATA, as_json: Json = False) -> None:
    """Revoke a key; every API process rejects it within two seconds."""

    async def run(queue: Queue) -> dict[str, Any]:
        key_id = auth.id_of(key) or key.removeprefix(auth.PREFIX)
        if not await queue.api_keys.revoke(key_id):
            raise NotFound("no such key; `fusequeue keys` lists all ids")
        return {"id": key_id, "revoked": True}

    row = _run(run, data_dir)
    if as_json:
        _print(row, as_json)
    else:
        print(f"{row['id']} is revoked; every API rejects it within two seconds")


@tenants.callback()
def list_tenants(context: typer.Context, data_dir: DataDir = DATA, as_json: Json = False) -> None:
    """List the tenants that have keys, limits or jobs, with what they keep and use; change their limits."""

    async def run(queue: Queue) -> list[dict[str, Any]]:
        limits = await queue.api_keys.tenant_limits()
        kept = await queue.api_keys.footprints()
        use = await queue.api_keys.tenant_use()
        spent = await queue.api_keys.spent()
        names = {key.tenant for key in await queue.api_keys.all()} | set(limits) | set(kept) | set(use) | set(spent)
        return [
            _tenant_row(name, limits.get(name), kept.get(name), use.get(name), spent.get(name))
            for name in sorted(names)
        ]

    if context.invoked_subcommand is None:
        rows = _run(run, data_dir)
        _print(rows if as_json else _with_values(rows), as_json)


@tenants.command()
def limit(
    tenant: str,
    requests_per_minute: Limit = None,
    queued_jobs: Limit = None,
    running_slots: Limit = None,
    device_seconds_per_day: Limit = None,
    device_seconds_per_month: Limit = None,
    kept_jobs: Limit = None,
    record_bytes: Limit = None,
    stored_objects: Limit = None,
    stored_bytes: Limit = None,
    data_dir: DataDir = DATA,
    as_json: Json = False,
) -> None:
    """Change the given limits of a tenant, and show all of them."""
    texts = {
        "requests_per_minute": requests_per_minute,
        "queued_jobs": queued_jobs,
        "running_slots": running_slots,
        "device_seconds_per_day": device_seconds_per_day,
        "device_seconds_per_month": device_seconds_per_month,
        "kept_jobs": kept_jobs,
        "record_bytes": record_bytes,
        "stored_objects": stored_objects,
        "stored_bytes": stored_bytes,
    }

    async def run(queue: Queue) -> dict[str, Any]:
        name = auth.tenant_name(tenant)
        changes = {field: _parse_limit(field, text) for field, text in texts.items() if text is not None}
        return {"tenant": name, **asdict(await queue.api_keys.change_limits(name, changes))}

    _print(_run(run, data_dir), as_json)


def _run(work: Callable[[Queue], Awaitable[Any]], data_dir: Path) -> Any:
    """Run `work` on the queue; errors are printed in one line and end the command."""
    environment.use_deployment(data_dir, os.environ)
    try:
        return asyncio.run(_on_queue(work))
    except (InvalidRequest, ConfigurationError) as error:
        message, status = error.message, Exit.USAGE
    except NotFound as error:
        message, status = error.message, Exit.NOT_FOUND
    except FusequeueError as error:
        unreachable = isinstance(error, Unavailable)
        message, status = error.message + _remedy(error, data_dir), Exit.UNREACHABLE if unreachable else Exit.FAILED
    except TimeoutError:
        message, status = f"no response from Redis within {TIMEOUT_S:.0f} s", Exit.UNREACHABLE
    print_error(message)
    raise typer.Exit(status)


def _remedy(error: FusequeueError, data_dir: Path) -> str:
    """Return what helps where neither `data_dir` nor a setting says which Redis is meant."""
    if not isinstance(error, RedisUnavailable) or os.environ.get(environment.REDIS_URL):
        return ""
    return f"; no `fusequeue up` has run on {data_dir}: name its --data-dir, or set {environment.REDIS_URL}"


async def _on_queue(work: Callable[[Queue], Awaitable[Any]]) -> Any:
    from shared.queue import Queue  # 0.2 s that only these commands need

    queue = Queue.connect(settings.load())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await queue.check(quiet=True)  # stdout is for the result; `fusequeue doctor` has the warnings
            return await work(queue)
    finally:
        await queue.close()


async def _mark_keys(data_dir: Path) -> None:
    """Record in the storage that keys are required, if the settings or `data_dir` name it; each API does it too."""
    from shared.storage import connect  # imports boto3, if there is a bucket

    config = settings.load()
    if config.s3_bucket is None and "FUSEQUEUE_STORAGE_DIR" not in os.environ:
        if not (data_dir / "storage").is_dir():
            return
        config = config.model_copy(update={"storage_dir": data_dir / "storage"})
    settings.withhold_permissions(config)
    try:
        storage = connect(config)
        try:
            await auth.mark_keys(storage, config.namespace)
        finally:
            await storage.close()
    except FusequeueError as error:
        print(f"not recorded in the storage, which the API does next: {error.message}", file=sys.stderr)


def _lifetime_s(expires: str) -> int:
    seconds = duration_s(expires) or 0
    if not 0 < seconds <= MAX_LIFETIME_S:
        message = f"expires: invalid duration {expires[:20]!r}; use one such as 90d, 12h or 30m, at most 100 years"
        raise InvalidRequest(message, param="expires")
    return seconds


def _parse_limit(name: str, text: str) -> int | None:
    if text == "default":
        return None
    if not text.isdecimal() or len(text) > 16:
        raise InvalidRequest(f"{name}: {text[:20]!r} must be a number, or `default`", param=name)
    return int(text)


def _tenant_row(
    name: str,
    limits: auth.TenantLimits | None,
    kept: auth.Footprint | None,
    use: auth.TenantUse | None,
    spent: auth.Spent | None,
) -> dict[str, Any]:
    values = asdict(kept or auth.Footprint()) | asdict(use or auth.TenantUse()) | asdict(spent or auth.Spent())
    used = {f"{field}_used": value for field, value in values.items()}
    return {"tenant": name, **asdict(limits or auth.TenantLimits()), **used}


def _key_row(key: auth.ApiKey) -> dict[str, Any]:
    state = "revoked" if key.revoked_at_ms is not None else "expired" if key.expired else "active"
    return {
        "id": key.id,
        "prefix": key.prefix,
        "tenant": key.tenant,
        "scopes": sorted(key.scopes),
        "name": key.name,
        "state": state,
        "created_at": _iso(key.created_at_ms),
        "expires_at": _iso(key.expires_at_ms),
        "last_used_at": _iso(key.last_used_at_ms),
    }


def _iso(at_ms: int | None) -> str | None:
    return None if at_ms is None else datetime.fromtimestamp(at_ms // 1000, UTC).isoformat().replace("+00:00", "Z")


def _print(result: Any, as_json: bool) -> None:
    """Print an object or a list of them: each as a line of JSON, or a table in which what is unset is a dash."""
    rows = result if isinstance(result, list) else [result]
    heads = [name for name in rows[0] if name != "id"] if rows else []
    CommandConsole(as_json).table(rows, heads, lambda row: [_cell(row[name]) for name in heads])


def _with_values(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without the columns of limits that none of them has: all of them are wider than a terminal."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)] if rows else []
    return [{name: row[name] for name in names} for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return "-" if value in (None, "") else str(value)
