"""The queue's Lua scripts: how a script is put together, and one typed method for each.

A script's parameters are listed in its `ARGV` line, in the order of the method's; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from shared.config.settings import Settings
from shared.queue.redis_keys import lua_keys

DEAD_LETTERS_MS = 7 * 86_400_000
DEAD_LETTERS_CAP = 10_000

Value: TypeAlias = str | int | float | None
ClaimRow: TypeAlias = Sequence[Any]
"""Job id, wire form, signature, epoch, 1 if solo, ms queued."""

FOLDER = Path(str(resources.files("shared.queue") / "lua"))
_NEEDS = re.compile(r"^-- NEEDS (.*)$", re.MULTILINE)


class ScriptRunner(Protocol):
    async def run(self, name: str, *args: str | float, once: bool = False) -> Any: ...


class SubmitArgs(NamedTuple):
    """The arguments of `submit` for each job, in this order. Empty texts stand for None."""

    id: str
    tenant: str
    rank: int
    slots: int
    sig: str
    model: str
    window: int
    max_batch: int
    wire: str
    created: int
    deadline: int | str
    batch: str
    input: str
    idempotency: str
    webhook: str
    video: int | str


@cache
def script_files() -> dict[str, Path]:
    """Return all Lua files by name; those in `lib` are parts of others."""
    return {path.stem: path for path in sorted(FOLDER.glob("*/*.lua"))}


def script_text(name: str, settings: Settings) -> str:
    """Return a script as it is sent: settings, key names, the parts in its `NEEDS` line and theirs, its body."""
    texts: dict[str, str] = {}
    for part in ("prelude", name):
        _collect(part, texts)
    body = "\n".join(texts.values())
    return "\n".join([_conf(settings), lua_keys(body), body])


def _collect(name: str, texts: dict[str, str]) -> None:
    text = script_files()[name].read_text("utf-8")
    for part in " ".join(_NEEDS.findall(text)).split():
        if part not in texts:
            _collect(part, texts)
    texts[name] = text


def _conf(settings: Settings) -> str:
    numbers = {
        "retention_ms": settings.retention_s * 1000,
        "input_retention_ms": settings.input_retention_s * 1000,
        "idempotency_ms": settings.idempotency_s * 1000,
        "max_queued_jobs": settings.max_queued_jobs,
        "max_queued_jobs_per_tenant": settings.max_queued_jobs_per_tenant,
        "max_running_slots_per_tenant": settings.max_running_slots_per_tenant or 0,
        "max_attempts": settings.max_attempts,
        "lease_ms": settings.lease_ms,
        "overdue_ms": settings.overdue_ms,
        "dead_ms": DEAD_LETTERS_MS,
        "dead_cap": DEAD_LETTERS_CAP,
    }
    return f"local conf = {{{', '.join(f'{name} = {number}' for name, number in numbers.items())}}}"


def _wire(value: Value) -> str | float:
    if value is None:
        return ""
    return int(value) if isinstance(value, bool) else value


class Scripts:
    """One method per script: named arguments in, converted reply out."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner

    async def _run(self, name: str, *args: Value, once: bool = False) -> Any:
        return await self._runner.run(name, *map(_wire, args), once=once)

    @classmethod
    def argv(cls, name: str) -> list[str]:
        """Return a script's parameters; the last one ends with `...` if it is variadic."""
        parameters = list(signature(getattr(cls, name)).parameters.values())[1:]
        return [f"{one.name}..." if one.kind is Parameter.VAR_POSITIONAL else one.name for one in parameters]

    # Jobs

    async def submit(self, *jobs: SubmitArgs) -> list[tuple[str, str]]:
        return list(await self._run("submit", *(value for job in jobs for value in job)))

    async def cancel_job(self, job_id: str) -> list[str]:
        return list(await self._run("cancel_job", job_id))

    async def forget_job(self, job_id: str) -> bool:
        return bool(await self._run("forget_job", job_id))

    async def queue_position(self, job_id: str) -> list[int]:
        return list(await self._run("queue_position", job_id))

    async def put_input(self, tenant: str, input_id: str, ref: str, ttl_ms: int, name: str) -> str:
        return str(await self._run("put_input", tenant, input_id, ref, ttl_ms, name))

    # Claims

    async def claim(
        self, worker: str, slots: int, lowest_rank: int, has_other_jobs: bool, *models: str | int
    ) -> list[ClaimRow]:
        return list(await self._run("claim", worker, slots, lowest_rank, has_other_jobs, *models, once=True))

    async def join(
        self, worker: str, signature: str, slots: int, lowest_rank: int, *models: str | int
    ) -> list[ClaimRow] | None:
        """Return the claims; None if jobs are held back for an overdue signature."""
        rows = await self._run("join", worker, signature, slots, lowest_rank, *models, once=True)
        return None if rows == [["overdue"]] else list(rows)

    async def next_ready_ms(self, worker: str, lowest_rank: int, *models: str | int) -> int | None:
        reply: int | None = await self._run("next_ready_ms", worker, lowest_rank, *models)
        return reply

    async def renew(self, worker: str, *claims: str | int) -> tuple[list[str], list[str]]:
        lost, canceled = await self._run("renew", worker, *claims)
        return lost, canceled

    async def settle(
        self,
        worker: str,
        job_id: str,
        epoch: int,
        token: str,
        state: str,
        artifacts: str,
        error: str | None,
        batching: str,
        timings: str,
        gpu_seconds: float,
        step: int,
        total: int,
    ) -> bool:
        facts = (state, artifacts, error, batching, timings, repr(gpu_seconds), step, total)
        return bool(await self._run("settle", worker, job_id, epoch, token, *facts))

    async def release(self, worker: str, *claims: str | int) -> int:
        return int(await self._run("release", worker, *claims))

    async def report_progress(self, message: str, *reports: str | int) -> int:
        return int(await self._run("report_progress", message, *reports))

    # Workers

    async def heartbeat(self, worker: str, info: str, ttl_ms: int, *models: str) -> None:
        await self._run("heartbeat", worker, info, ttl_ms, *models)

    async def learn_cost(self, device: str, model: str, shape: str, rows: int, seconds: float) -> None:
        await self._run("learn_cost", device, model, shape, rows, repr(seconds))

    async def learn_start_time(self, seconds: float) -> None:
        await self._run("learn_start_time", repr(seconds))

    async def queue_depths(self, *signatures: str) -> list[list[int | str]]:
        return list(await self._run("queue_depths", *signatures))

    # Maintenance

    async def reclaim(self, limit: int) -> list[str]:
        return list(await self._run("reclaim", limit))

    async def expire(self, limit: int) -> int:
        return int(await self._run("expire", limit))

    async def bury_job(self, job_id: str, reason: str, detail: str) -> None:
        await self._run("bury_job", job_id, reason, detail)

    async def redrive_dead_letter(self, letter_id: str) -> bool:
        return bool(await self._run("redrive_dead_letter", letter_id))

    async def purge_dead_letter(self, letter_id: str) -> bool:
        return bool(await self._run("purge_dead_letter", letter_id))

    async def expired_items(self, limit: int) -> list[str]:
        return list(await self._run("expired_items", limit))

    async def forget_item(self, row: str) -> None:
        await self._run("forget_item", row)

    async def reconcile_jobs(self, *job_ids: str) -> int:
        return int(await self._run("reconcile_jobs", *job_ids))

    async def reconcile_lanes(self, *lanes: str) -> int:
        return int(await self._run("reconcile_lanes", *lanes))

    async def reconcile_signatures(self, *signatures: str) -> int:
        return int(await self._run("reconcile_signatures", *signatures))

    async def reconcile_running_slots(self) -> int:
        return int(await self._run("reconcile_running_slots"))

    async def reconcile_queued_jobs(self) -> int:
        return int(await self._run("reconcile_queued_jobs"))

    # API keys and limits

    async def create_key(
        self, key_id: str, digest: str, tenant: str, scopes: str, name: str, ttl_ms: int | None
    ) -> tuple[str, int]:
        code, created_at_ms = await self._run("create_key", key_id, digest, tenant, scopes, name, ttl_ms)
        return code, created_at_ms

    async def identify(self, key_id: str | None, default_tenant: str) -> tuple[int, list[str], int, list[str]]:
        any_created, fields, expired, limits = await self._run("identify", key_id, default_tenant)
        return any_created, fields, expired, limits

    async def note_use(self, key_id: str) -> bool:
        return bool(await self._run("note_use", key_id))

    async def revoke_key(self, key_id: str) -> bool:
        return bool(await self._run("revoke_key", key_id))

    async def admit(self, tenant: str, requests_per_minute: int) -> list[int]:
        return list(await self._run("admit", tenant, requests_per_minute))

    # Batches and files

    async def create_batch(
        self, tenant: str, batch_id: str, file_id: str, max_batches: int, created_at_ms: int, *fields: str | int
    ) -> str:
        return str(await self._run("create_batch", tenant, batch_id, file_id, max_batches, created_at_ms, *fields))

    async def cancel_batch(self, tenant: str, batch_id: str) -> bool:
        return bool(await self._run("cancel_batch", tenant, batch_id))

    async def commit_batch(
        self, tenant: str, batch_id: str, revision: int, again_ms: int | None, keep_ms: int, update: str
    ) -> bool:
        return bool(await self._run("commit_batch", tenant, batch_id, revision, again_ms, keep_ms, update))

    async def due_batches(self, limit: int, again_ms: int) -> list[str]:
        return list(await self._run("due_batches", limit, again_ms))

    async def begin_file(self, tenant: str, file_id: str, max_files: int, remove_after_ms: int) -> str:
        return str(await self._run("begin_file", tenant, file_id, max_files, remove_after_ms))

    async def put_file(
        self,
        tenant: str,
        file_id: str,
        filename: str,
        purpose: str,
        size: int,
        created_at_ms: int,
        expires_at_ms: int,
        *parts: str,
    ) -> None:
        facts = (filename, purpose, size, created_at_ms, expires_at_ms)
        await self._run("put_file", tenant, file_id, *facts, *parts)

    async def forget_file(self, tenant: str, file_id: str) -> str:
        return str(await self._run("forget_file", tenant, file_id))

    # Webhooks

    async def put_endpoint(
        self, tenant: str, endpoint_id: str, endpoint: str | None, max_endpoints: int, must_exist: bool
    ) -> str:
        return str(await self._run("put_endpoint", tenant, endpoint_id, endpoint, max_endpoints, must_exist))

    async def expand_outbox(self, limit: int) -> int:
        return int(await self._run("expand_outbox", limit))

    async def claim_deliveries(
        self, limit: int, max_per_host: int, again_ms: int, *in_progress: str | int
    ) -> list[tuple[str, list[str], str]]:
        return list(await self._run("claim_deliveries", limit, max_per_host, again_ms, *in_progress, once=True))

    async def record_attempt(
        self, delivery_id: str, state: str, retry_ms: int | None, attempt: str, gone: bool, disable_after_ms: int
    ) -> bool:
        return bool(await self._run("record_attempt", delivery_id, state, retry_ms, attempt, gone, disable_after_ms))

    async def redeliver(self, delivery_id: str, tenant: str, *new: str) -> bool:
        return bool(await self._run("redeliver", delivery_id, tenant, *new))

    # Synchronous calls

    async def join_sync_call(self, tenant: str, digest: str, keep_ms: int) -> str | None:
        reply: str | None = await self._run("join_sync_call", tenant, digest, keep_ms)
        return reply

    async def abandon_sync_call(self, tenant: str, digest: str, job_id: str, score: int) -> bool:
        return bool(await self._run("abandon_sync_call", tenant, digest, job_id, score))
