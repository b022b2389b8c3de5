"""Files of uploaded adapters on the worker's disk, fetched from storage when a job needs them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog

from shared.config.adapters import AdapterSpec, UploadedAdapter, uploaded_ids
from shared.errors import AdapterUnavailable, NotFound
from shared.inputs.adapter_store import stored_chunks
from shared.job import Job
from shared.queue import Queue
from shared.runtime.asyncio_tools import retry_while_unavailable
from shared.storage import Storage

log = structlog.get_logger()

Until = Callable[[], bool]


@dataclass
class _LocalFile:
    """A file in a folder of its own, complete once `fetching` is done; `users` running jobs need it."""

    adapter: UploadedAdapter
    folder: Path
    fetching: asyncio.Task[Path] | None = None
    users: int = 0

    @property
    def failed(self) -> bool:
        task = self.fetching
        return task is None or (task.done() and (task.cancelled() or task.exception() is not None))


class AdapterFolder:
    """The files of one worker, of at most `budget_bytes` unless running jobs need more; used on the event loop only."""

    def __init__(self, queue: Queue, storage: Storage, budget_bytes: int, parent: Path | None = None) -> None:
        self._queue = queue
        self._storage = storage
        self._budget_bytes = budget_bytes
        self._folder = _LockedFolder(parent or Path(tempfile.gettempdir()) / f"fusequeue-adapters-{os.getuid()}")
        self._files: OrderedDict[str, _LocalFile] = OrderedDict()

    def remove_leftovers(self) -> None:
        """Delete the files of workers that ended without doing so; blocks."""
        self._folder.remove_leftovers()

    def close(self) -> None:
        """Delete the files; blocks."""
        for file in self._files.values():
            if file.fetching is not None:
                file.fetching.cancel()
        self._files.clear()
        self._folder.remove()

    @asynccontextmanager
    async def held(self, job: Job, until: Until) -> AsyncIterator[tuple[AdapterSpec, ...]]:
        """Yield the uploaded adapters of a job, as files that stay while the block runs.

        Raises `AdapterUnavailable` for a deleted one. An outage is waited for until `until` returns True; then some are
        missing.
        """
        async with AsyncExitStack() as stack:
            specs = []
            for adapter_id in uploaded_ids(job.adapters):
                path, adapter = None, await self._record(job.tenant, adapter_id, until)
                if adapter is not None:
                    path = await stack.enter_async_context(self._file(job.tenant, adapter, until))
                if adapter is None or path is None:
                    break
                of_file = adapter.model_dump(include={"component", "token"})
                specs.append(AdapterSpec(id=adapter_id, source=str(path), **of_file))
            yield tuple(specs)

    async def _record(self, tenant: str, adapter_id: str, until: Until) -> UploadedAdapter | None:
        read = partial(self._queue.adapters.get, tenant, adapter_id)
        try:
            return await retry_while_unavailable(read, "adapter_read_failed", until=until)
        except NotFound:
            raise _deleted(adapter_id) from None

    @asynccontextmanager
    async def _file(self, tenant: str, adapter: UploadedAdapter, until: Until) -> AsyncIterator[Path | None]:
        file = self._files.get(adapter.id)
        if file is None:
            folder = self._folder.path / f"{adapter.id}-{secrets.token_hex(4)}"
            file = self._files[adapter.id] = _LocalFile(adapter, folder)
        self._files.move_to_end(adapter.id)
        file.users += 1
        try:
            fetched = partial(self._fetched, tenant, file)
            yield await retry_while_unavailable(fetched, "adapter_fetch_failed", until=until)
        finally:
            file.users -= 1
            await self._trim()

    async def _fetched(self, tenant: str, file: _LocalFile) -> Path:
        """Return the path once the file is complete; jobs that need it at the same time share one fetch."""
        if file.fetching is None or file.failed:
            file.fetching = asyncio.create_task(self._fetch(tenant, file.adapter, file.folder))
        return await asyncio.shield(file.fetching)

    async def _fetch(self, tenant: str, adapter: UploadedAdapter, folder: Path) -> Path:
        path, digest = folder / "adapter.safetensors", hashlib.sha256()
        try:
            await asyncio.to_thread(self._folder.create)
            await asyncio.to_thread(folder.mkdir, exist_ok=True)
            with await asyncio.to_thread(path.open, "wb") as opened:
                async for chunk in stored_chunks(self._storage, tenant, adapter.id, adapter.parts):
                    digest.update(chunk)
                    await asyncio.to_thread(opened.write, chunk)
        except NotFound:
            raise _deleted(adapter.id) from None
        except OSError as error:
            message = f"adapter {adapter.id!r} cannot be written to the worker's disk: {error.strerror or error}"
            raise AdapterUnavailable(message, param="adapters") from error
        if digest.hexdigest() != adapter.sha256:
            raise AdapterUnavailable(f"adapter {adapter.id!r} is damaged in storage; upload it again", param="adapters")
        return path

    async def _trim(self) -> None:
        """Delete files that no job uses: those whose fetch failed, and above the budget the least recently used."""
        for file in self._take_unused():
            if file.fetching is not None:
                file.fetching.cancel()
            await asyncio.to_thread(shutil.rmtree, file.folder, ignore_errors=True)

    def _take_unused(self) -> list[_LocalFile]:
        """Remove the files to delete from those that jobs find; without waiting, as jobs can end at the same time."""
        total, unused = sum(file.adapter.bytes for file in self._files.values()), []
        for adapter_id, file in list(self._files.items()):
            if file.users == 0 and (file.failed or total > self._budget_bytes):
                total -= file.adapter.bytes
                unused.append(self._files.pop(adapter_id))
        return unused


class _LockedFolder:
    """A folder of this process below `parent`. Its lock file is held, so that other workers see that it is in use."""

    def __init__(self, parent: Path) -> None:
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.path = parent / name
        self._parent, self._lock_path = parent, parent / f"{name}.lock"
        self._lock: int | None = None
        self._creating = threading.Lock()

    def create(self) -> None:
        """Create the folder unless it exists; raises `OSError`."""
        with self._creating:
            if self._lock is None:
                self._lock = self._create()

    def _create(self) -> int:
        self._parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._parent.lstat().st_uid != os.getuid():  # another user could replace what is in it
            raise PermissionError(f"{self._parent} belongs to another user; set TMPDIR")
        while True:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                break
            os.close(lock)  # a worker that removes leftovers has deleted it before it was locked
        self.path.mkdir(mode=0o700, exist_ok=True)
        return lock

    def remove(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def remove_leftovers(self) -> None:
        """Delete the folders whose processes have ended: the system releases their locks."""
        for lock_path in self._parent.glob("*.lock") if self._parent.is_dir() else ():
            with contextlib.suppress(OSError), lock_path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
                lock_path.unlink(missing_ok=True)
                log.info("adapter_leftovers_removed", folder=str(lock_path.with_suffix("")))


def _deleted(adapter_id: str) -> AdapterUnavailable:
    return AdapterUnavailable(
        f"adapter {adapter_id!r} has been deleted; upload it again, or submit the job without it", param="adapters"
    )
