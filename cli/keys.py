"""`fusequeue keys` and `fusequeue tenants`: they start the process that speaks to Redis."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Annotated

import typer

from cli.up import redis_server

keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")
tenants = typer.Typer(no_args_is_help=True, help="The limits of tenants.")

DataDir = Annotated[Path, typer.Option(help="Folder of a running `fusequeue up`; FUSEQUEUE_REDIS_URL goes before it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Limit = Annotated[str | None, typer.Option(help="A number, or `default` for what the settings say.")]
DATA = Path("data")


@keys.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whose jobs it sees and makes.")] = "default",
    scopes: Annotated[str, typer.Option(help="Of jobs:read, jobs:write, admin.")] = "jobs:read,jobs:write",
    name: Annotated[str, typer.Option(help="A note for people.")] = "",
    expires: Annotated[str | None, typer.Option(help="Such as 90d, 12h, 30m. Unset: never.")] = None,
    data_dir: DataDir = DATA,
    json: Json = False,
) -> None:
    """Make a key and print it, this once. From the first key on, the API asks for keys."""
    options = [f"--tenant={tenant}", f"--scopes={scopes}", f"--name={name}"]
    _become(data_dir, json, "create", *options, *([] if expires is None else [f"--expires={expires}"]))


@keys.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only the keys of this one.")] = None,
    data_dir: DataDir = DATA,
    json: Json = False,
) -> None:
    """List the keys, with when each was last used."""
    _become(data_dir, json, "list", *([] if tenant is None else [f"--tenant={tenant}"]))


@keys.command()
def revoke(
    key: Annotated[str, typer.Argument(help="Its id, its prefix, or the key itself.")],
    data_dir: DataDir = DATA,
    json: Json = False,
) -> None:
    """Revoke a key; every API refuses it within two seconds."""
    _become(data_dir, json, "revoke", "--", key)


@tenants.command("list")
def list_tenants(data_dir: DataDir = DATA, json: Json = False) -> None:
    """List the tenants that have keys or limits of their own."""
    _become(data_dir, json, "tenants")


@tenants.command()
def limit(
    tenant: str,
    requests_per_minute: Limit = None,
    queued_jobs: Limit = None,
    running_slots: Limit = None,
    data_dir: DataDir = DATA,
    json: Json = False,
) -> None:
    """Change a tenant's own limits, and show them."""
    asked = {
        "requests-per-minute": requests_per_minute,
        "queued-jobs": queued_jobs,
        "running-slots": running_slots,
    }
    _become(
        data_dir, json, "limit", *[f"--{name}={word}" for name, word in asked.items() if word is not None], "--", tenant
    )


def _become(data_dir: Path, json: bool, *arguments: str) -> None:
    point_at(data_dir, os.environ)
    first = ["--json"] if json else []
    os.execv(sys.executable, [sys.executable, "-P", "-m", "shared.keyring", *first, *arguments])


def point_at(data_dir: Path, environ: MutableMapping[str, str]) -> None:
    """Name the Redis of the `fusequeue up` that runs on `data_dir`, where the environment names none."""
    if "FUSEQUEUE_REDIS_URL" not in environ and (url := redis_server.url_of(data_dir / "redis")) is not None:
        environ["FUSEQUEUE_REDIS_URL"] = url
