"""The queue's Lua scripts: how a script is put together, and one typed method for each.

KEYS[1] is the prefix of all keys in every script. The arguments of its method are the fields of the table `args`, in
the types of the method (`script_arguments.py`); a script's `args` line names them, and a test compares the two.

The Redis client sends a command again when its reply is lost. So each script either changes nothing more when it runs
again with the same arguments, or is one of `REPLAYED`; a test runs all of them twice.
"""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias, cast

from shared.config.settings import Settings
from shared.queue.order.signatures import Blocked
from shared.queue.policy_table import POLICIES, lua_conf, policy_value
from shared.queue.redis_keys import lua_keys
from shared.queue.script_arguments import (
    AddedSize,
    ClaimKey,
    ModelLoad,
    ProgressRow,
    SubmitArgs,
    lua_arguments,
    parameter_names,
)

DEAD_LETTERS_MS = 7 * 86_400_000
DEAD_LETTERS_CAP = 10_000
IDEMPOTENCY_KEYS = 100_000
"""New keys of a tenant within their lifetime, 20 MB; more where its quota of kept jobs is larger."""

DUE_AT_ONCE = 100
"""Jobs for later that one script queues or tells."""

MAX_CHILDREN = 10_000
"""Most jobs that wait for the end of one."""

MAX_GROUPS = 1_000
"""Groups of a tenant: each takes 200 bytes, besides its jobs."""

MAX_SYNC_CALLS = 1_000
"""Most unfinished jobs kept per request body."""

ClaimRow: TypeAlias = Sequence[Any]
"""Job id, wire form, signature, epoch, 1 if solo, ms queued, ms to its deadline or -1, ms to its latest start or -1,
its checkpoint or ''."""

FOLDER = Path(str(resources.files("shared.queue") / "lua"))
_NEEDS = re.compile(r"^-- NEEDS (.*)$", re.MULTILINE)
_FUNCTION = re.compile(r"^(?:local )?function ([\w.]+)\((?:.* end$|[\s\S]*?^end$)", re.MULTILINE)
_NAME = re.compile(r"\w+(?:\.\w+)*")
_RUNS_WHEN_FULL = re.compile(r"^-- RUNS when Redis is full$", re.MULTILINE)
_WRITE_NOTHING = "redis.call('DEL', PREFIX)"
"""Redis at `maxmemory` refuses a script only at its first write, and never one that begins with a deletion."""

REPLAYED = frozenset(
    {
        *("transact", "give_up", "list_as_waiting", "admit"),
    }
)
"""Scripts that a repetition would apply twice or answer differently. KEYS[2] is the key of the call's reply, which a
repetition returns. `take` keeps its claims per worker instead (`lib/last_claim.lua`)."""

REPLY_KEPT_MS = 30_000
"""The client repeats a command within two timeouts, a pause and a connect: 16 s."""

_REPLAY = """local kept_reply = redis.call('GET', KEYS[2])
if kept_reply then return cjson.decode(kept_reply)[1] end
local function script()
{text}
end
local reply, unchanged = script()
if not unchanged then redis.call('SET', KEYS[2], cjson.encode({{reply}}), 'PX', {kept_ms}) end
return reply
"""


class ScriptRunner(Protocol):
    async def run(self, name: str, *args: str | float) -> Any: ...


PARTS = frozenset({"lib", "tenants", "deadlines"})
"""Folders of files that are parts of scripts."""


@cache
def script_files() -> dict[str, Path]:
    """Return all Lua files by name: scripts and parts."""
    return {path.stem: path for path in sorted(FOLDER.glob("*/*.lua"))}


def script_text(name: str, settings: Settings) -> str:
    """Return a script as it is sent: key names, policies, the parts in its `NEEDS` line and theirs, its body.

    A replayed script is the body of a function, which can return true as a second value: it has changed nothing.
    """
    return _text(name, tuple(policy_value(settings, policy) for policy in POLICIES), tuple(_constants().items()))


@lru_cache(maxsize=64)
def _text(name: str, policies: tuple[int | float, ...], constants: tuple[tuple[str, int], ...]) -> str:
    body = _body(name)
    first = [_WRITE_NOTHING] if runs_when_full(name) else []
    conf = lua_conf(dict(zip(POLICIES, policies, strict=True)), dict(constants), body)
    text = "\n".join([lua_keys(conf + body), *first, conf, lua_arguments(getattr(Scripts, name)), body])
    return _REPLAY.format(text=text, kept_ms=REPLY_KEPT_MS) if name in REPLAYED else text


def runs_when_full(name: str) -> bool:
    """Return whether a script runs while Redis is at `maxmemory`: all that do not add what clients send."""
    return _RUNS_WHEN_FULL.search(script_files()[name].read_text("utf-8")) is not None


@cache
def _body(name: str) -> str:
    """Return a script with its parts, whatever the policies are. All scripts take 0.1 s of CPU time."""
    texts: dict[str, str] = {}
    for part in ("prelude", name):
        _collect(part, texts)
    own = texts.pop(name)
    return _without_unused("\n".join(texts.values()), own)


def _collect(name: str, texts: dict[str, str]) -> None:
    text = script_files()[name].read_text("utf-8")
    for part in " ".join(_NEEDS.findall(text)).split():
        if part not in texts:
            _collect(part, texts)
    texts[name] = text


def _without_unused(parts: str, own: str) -> str:
    """Return a script without the functions of its parts that nothing calls: each run would make them again."""
    names, functions = Counter(_NAME.findall(f"{parts}\n{own}")), list(_FUNCTION.finditer(parts))
    while unused := [one for one in functions if names[one[1]] == 1]:
        for one in unused:
            names.subtract(_NAME.findall(one[0]))
    for one in reversed(functions):
        if not names[one[1]]:
            parts = parts[: one.start()] + parts[one.end() :]
    return f"{parts}\n{own}"


def _constants() -> dict[str, int]:
    return {
        "idempotency_keys": IDEMPOTENCY_KEYS,
        "max_sync_calls": MAX_SYNC_CALLS,
        "max_groups": MAX_GROUPS,
        "max_children": MAX_CHILDREN,
        "dead_ms": DEAD_LETTERS_MS,
        "dead_cap": DEAD_LETTERS_CAP,
    }


class Scripts(Protocol):
    """One method per script. None is sent as an empty text; 1 or 0 is returned as the bool that a method declares."""

    # Transactions
    async def read_replies(self, commands: str) -> tuple[int, *tuple[str, ...]]: ...
    async def transact(self, when_full: bool, fences: str, writes: str, *added: AddedSize) -> str: ...

    # Jobs
    async def submit(self, positions: bool, *jobs: SubmitArgs) -> list[list[Any]]: ...
    async def cancel_jobs(self, *job_ids: str) -> list[str]: ...
    async def pause_jobs(self, *job_ids: str) -> list[str]: ...
    async def resume_jobs(self, *job_ids: str) -> list[str]: ...
    async def queue_due(self, limit: int) -> int: ...
    async def read_places(self, job_id: str) -> str: ...

    # Claims
    async def read_order(
        self, worker: str, token: str, preempted: str, page: int, tenants: bool, *models: ModelLoad
    ) -> str: ...
    async def read_lanes(
        self, worker: str, signature: str, slots: int, lowest_rank: int, page: int, tenant: str
    ) -> str: ...
    async def take(
        self, worker: str, token: str, signature: str, hold: bool, decision: str
    ) -> tuple[int, list[ClaimRow]]: ...
    async def defer(self, *blocked: Blocked) -> None: ...
    async def list_as_waiting(
        self, worker: str, wait_ms: int, wakeups: str, idle: bool, signature: str, *models: ModelLoad
    ) -> tuple[int, int, int, list[str]]: ...
    async def renew(self, worker: str, *claims: ClaimKey) -> tuple[list[str], list[str], list[str]]: ...
    async def give_up(self, worker: str, cause: str | None, *claims: ClaimKey) -> int: ...
    async def report_progress(self, *reports: ProgressRow) -> int: ...
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
        device_seconds: float,
        step: int,
        total: int,
        objects: int,
        stored_bytes: int,
        wire: str | None,
        used: str,
        warnings: str | None,
        device_times: str,
        resumed: int,
    ) -> int: ...
    async def keep_checkpoint(
        self, worker: str, job_id: str, epoch: int, checkpoint: str | None, size: str, step: int, left: float
    ) -> str: ...

    # Workers
    async def heartbeat(self, worker: str, info: str, ttl_ms: int, served: str, digest: str, *models: str) -> bool: ...

    # Maintenance
    async def reclaim(self, limit: int, decided: int, before: int, gap: int, gaps: int) -> list[str]: ...

    # API keys and limits
    async def admit(self, tenant: str, requests_per_minute: int) -> list[int]: ...


def script_methods(runner: ScriptRunner) -> Scripts:
    """Return the methods of `Scripts`; `runner` runs their scripts."""
    methods = {name: _method(runner, name) for name in vars(Scripts) if name in script_files()}
    return cast("Scripts", SimpleNamespace(**methods))


def _method(runner: ScriptRunner, name: str) -> Callable[..., Awaitable[Any]]:
    names = parameter_names(getattr(Scripts, name))
    is_bool = getattr(Scripts, name).__annotations__["return"] is bool

    async def method(*args: Any, **named: Any) -> Any:
        values = (*args, *(named[one] for one in names[len(args) :])) if named else args
        reply = await runner.run(name, *_wire(values))
        return bool(reply) if is_bool else reply

    return method


def _wire(values: Sequence[Any]) -> Iterator[str | float]:
    for value in values:
        if isinstance(value, tuple):
            yield from _wire(value)
        elif value is None:
            yield ""
        else:
            yield int(value) if isinstance(value, bool) else value
