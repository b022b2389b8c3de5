"""`python -m shared.keyring`: make, list and revoke API keys, and set the limits of tenants.

It speaks to Redis and not to the API: whoever may read the settings of a deployment may do this, so the first key needs
none. `fusequeue keys` and `fusequeue tenants` start it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from shared.auth import DEFAULT_TENANT, PREFIX, ApiKey, Scope, TenantLimits, id_of, scopes_of, seconds_of, tenant_name
from shared.config import settings
from shared.errors import FusequeueError, InvalidRequest, NotFound
from shared.queue import Queue

TIMEOUT_S = 20.0
EXIT_FAILED, EXIT_USAGE = 1, 2
_LIMITS = tuple(asdict(TenantLimits()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; returns 0, 1 where it cannot be done, 2 where it says something wrong."""
    asked = _parser().parse_args(arguments)
    try:
        told = asyncio.run(_run(asked))
    except InvalidRequest as error:
        print(f"fusequeue: {error.message}", file=sys.stderr)
        return EXIT_USAGE
    except FusequeueError as error:
        print(f"fusequeue: {error.message}", file=sys.stderr)
        return EXIT_FAILED
    except TimeoutError:
        print(f"fusequeue: Redis did not answer within {TIMEOUT_S:.0f} s", file=sys.stderr)
        return EXIT_FAILED
    _tell(asked, told)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fusequeue", description="API keys and tenants.")
    parser.add_argument("--json", action="store_true")
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create")
    create.add_argument("--tenant", default=DEFAULT_TENANT)
    create.add_argument("--scopes", default=f"{Scope.JOBS_READ},{Scope.JOBS_WRITE}")
    create.add_argument("--name", default="")
    create.add_argument("--expires")
    commands.add_parser("list").add_argument("--tenant")
    commands.add_parser("revoke").add_argument("key")
    commands.add_parser("tenants")
    limit = commands.add_parser("limit")
    limit.add_argument("tenant")
    for name in _LIMITS:
        limit.add_argument(f"--{name.replace('_', '-')}")
    return parser


async def _run(asked: argparse.Namespace) -> Any:
    queue = Queue.connect(settings.load())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await queue.check()
            return await _COMMANDS[asked.command](queue, asked)
    finally:
        await queue.close()


async def _create(queue: Queue, asked: argparse.Namespace) -> dict[str, Any]:
    lives_s = None if asked.expires is None else seconds_of(asked.expires)
    token, key = await queue.api_keys.create(
        tenant_name(asked.tenant), scopes_of(asked.scopes), name=asked.name, lives_s=lives_s
    )
    return {"key": token, **_shown(key)}


async def _list(queue: Queue, asked: argparse.Namespace) -> list[dict[str, Any]]:
    return [_shown(key) for key in await queue.api_keys.all() if asked.tenant in (None, key.tenant)]


async def _revoke(queue: Queue, asked: argparse.Namespace) -> dict[str, Any]:
    """Revoke by a key's id, its prefix, or the key itself."""
    key_id = id_of(asked.key) or asked.key.removeprefix(PREFIX)
    if not await queue.api_keys.revoke(key_id):
        raise NotFound("there is no such key; `fusequeue keys list` shows the ids of all")
    return {"id": key_id, "revoked": True}


async def _tenants(queue: Queue, asked: argparse.Namespace) -> list[dict[str, Any]]:
    limits = await queue.api_keys.tenant_limits()
    named = {key.tenant for key in await queue.api_keys.all()} | set(limits)
    return [{"tenant": name, **asdict(limits.get(name, TenantLimits()))} for name in sorted(named)]


async def _limit(queue: Queue, asked: argparse.Namespace) -> dict[str, Any]:
    """Change those limits that are named; `default` leaves one to the settings."""
    tenant = tenant_name(asked.tenant)
    limits = asdict((await queue.api_keys.tenant_limits()).get(tenant, TenantLimits()))
    for name in _LIMITS:
        word = getattr(asked, name)
        if word is not None:
            limits[name] = _limit_of(name, word)
    await queue.api_keys.set_limits(tenant, TenantLimits(**limits))
    return {"tenant": tenant, **limits}


def _limit_of(name: str, word: str) -> int | None:
    if word == "default":
        return None
    if not word.isdecimal() or len(word) > 10:
        raise InvalidRequest(f"{name}: {word[:20]!r} must be a number, or `default`", param=name)
    return int(word)


_COMMANDS = {"create": _create, "list": _list, "revoke": _revoke, "tenants": _tenants, "limit": _limit}


def _shown(key: ApiKey) -> dict[str, Any]:
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


def _tell(asked: argparse.Namespace, told: Any) -> None:
    """Print what was done; of a new key the key alone goes to stdout, so that a script can take it."""
    if asked.json:
        print(json.dumps(told, indent=2))
    elif asked.command == "create":
        print(told["key"])
        scopes, expires = ", ".join(told["scopes"]), told["expires_at"] or "never"
        print(f"shown this once; tenant {told['tenant']}, scopes {scopes}, expires {expires}", file=sys.stderr)
    elif asked.command == "revoke":
        print(f"{told['id']} is revoked; every API refuses it within two seconds")
    else:
        rows = told if isinstance(told, list) else [told]
        print(_table(rows) if rows else "none")


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as aligned columns; a limit or a time that is not set is a dash."""
    heads = [name for name in rows[0] if name != "id"]
    cells = [heads, *([_cell(row[name]) for name in heads] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return "-" if value in (None, "") else str(value)


if __name__ == "__main__":
    sys.exit(main())
