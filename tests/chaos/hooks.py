"""Points in a process of the stack at which the harness sends it a signal, or lets its disk be full."""

from __future__ import annotations

import errno
import functools
import http.client
import itertools
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

HOOK, DISK_FULL = "CHAOS_HOOK", "CHAOS_DISK_FULL"
PNG = b"\x89PNG"
WORKER_HOOKS = (
    "after_claim",
    "mid_forward",
    "before_upload",
    "during_upload",
    "after_upload",
    "before_settle",
    "after_settle",
)
API_HOOKS = ("before_submit", "after_submit")

_counts = {name: itertools.count(1) for name in (*WORKER_HOOKS, *API_HOOKS)}


def hook(name: str, count: int = 1, number: int = signal.SIGKILL) -> dict[str, str]:
    """Return the environment of a process that sends itself a signal when it reaches a point for the `count`th time."""
    return {HOOK: f"{name} {count} {int(number)}"}


def reach(name: str) -> None:
    """Pass a point; the process may end or stop here."""
    reached = next(_counts[name])
    wanted, count, number = (os.environ.get(HOOK) or "- 0 0").split()
    if wanted == name and reached == int(count):
        os.kill(os.getpid(), int(number))


def install() -> None:
    """Wrap the public parts of queue and storage with the points."""
    from shared.queue.claims import Claims
    from shared.queue.jobs import Jobs
    from shared.storage.folder import FolderStorage
    from shared.storage.s3 import S3Storage

    for name in ("claim", "join"):
        _wrap(Claims, name, after="after_claim", counts=bool)
    _wrap(Claims, "settle", before="before_settle", after="after_settle")
    _wrap(Jobs, "submit", before="before_submit", after="after_submit")
    for storage in (FolderStorage, S3Storage):
        _wrap(storage, "put", before="before_upload", after="after_upload")
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        """The only file that a worker syncs is an upload before its rename."""
        full = os.environ.get(DISK_FULL)
        if full and Path(full).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reach("during_upload")
        sync(descriptor)

    os.fsync = fsync
    send = http.client.HTTPConnection.send

    def send_in_halves(self: http.client.HTTPConnection, data: Any, *more: Any) -> None:
        if not (isinstance(data, bytes) and PNG in data):
            return send(self, data, *more)
        send(self, data[: len(data) // 2], *more)
        reach("during_upload")
        return send(self, data[len(data) // 2 :], *more)

    http.client.HTTPConnection.send = send_in_halves  # type: ignore[method-assign]


def _wrap(
    owner: type, name: str, *, before: str = "", after: str = "", counts: Callable[[Any], bool] = lambda _: True
) -> None:
    method: Callable[..., Awaitable[Any]] = getattr(owner, name)

    @functools.wraps(method)
    async def wrapped(*args: Any, **named: Any) -> Any:
        if before:
            reach(before)
        result = await method(*args, **named)
        if after and counts(result):
            reach(after)
        return result

    setattr(owner, name, wrapped)
