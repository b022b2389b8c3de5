"""Adapters that requests name by URL or on the hub: fetched before the job is accepted, then adapters of the tenant.

A file is stored once for a tenant, model and URL, and compared with its host again after `adapter_recheck_s`. Requests
that name one at the same time share a fetch, which goes on when they have left: a repetition finds its adapter.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO

import structlog

from api.jobs.adapter_intake import AdapterIntake, token_in
from shared.config.adapters import FETCHED_MAX_SCALE, AdapterChoice, UploadedAdapter
from shared.config.destinations import without_signature
from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.errors import (
    AdapterNotFetched,
    AdapterRejected,
    Faults,
    FetchFailed,
    FetchInterrupted,
    FetchRefused,
    InvalidRequest,
)
from shared.inputs import adapter_download, adapter_store
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.queue import Queue
from shared.queue.tenants.adapters import FetchedSource
from shared.runtime.clock import new_id, now_ms
from shared.runtime.shares import SharedPool, SharedTurns
from shared.storage import Storage

log = structlog.get_logger()

_FETCHES = 4  # at the same time in this process, each with a temporary file
_turns = SharedTurns(SharedPool("adapter_fetches", _FETCHES), max_waiting=64, timeout_s=30.0)
_MAX_LISTING_BYTES = 2 * 1024 * 1024
_running: dict[tuple[Queue, str, str], asyncio.Task[str]] = {}


def source_faults(choices: Sequence[AdapterChoice], settings: Settings) -> Iterator[InvalidRequest]:
    """Yield the faults of adapters that the settings do not allow to be fetched."""
    guard = FetchGuard(FetchRules.for_adapters(settings))
    for at, choice in enumerate(choices):
        if not choice.is_fetched:
            continue
        param = f"adapters.{at}.{choice.place}"
        try:
            target = guard.check_url(choice.url or settings.adapter_hub_url)
            adapter_download.check_host(target.host, settings.adapter_hosts)
        except FetchRefused as error:
            yield AdapterRejected(f"{param}: {error.message}", param=param)


@dataclass(frozen=True)
class AdapterFetcher:
    """The adapters of one tenant and model."""

    tenant: str
    spec: ModelSpec
    queue: Queue
    storage: Storage
    settings: Settings
    wait_s: float = math.inf
    """How long a request waits, if that is less than `adapter_fetch_timeout_s`."""

    async def resolve(self, choices: Sequence[AdapterChoice]) -> tuple[AdapterChoice, ...]:
        """Return the choices by id, after fetching those that are named otherwise.

        Raises `InvalidRequest` with the faults of all of them, or `Overloaded`, `Conflict` or `QuotaExceeded`.
        """
        resolved: list[AdapterChoice] = []
        faults = Faults()
        until_s = time.monotonic() + self._wait_s
        for at, choice in enumerate(choices):
            with faults.collected():
                id_ = choice.id or await self._fetched(choice, f"adapters.{at}.{choice.place}", until_s)
                resolved.append(AdapterChoice(id=id_, scale=choice.scale))
        faults.check()
        return tuple(resolved)

    async def _fetched(self, choice: AdapterChoice, param: str, until_s: float) -> str:
        """Return the id of the adapter of a choice; errors name `param`."""
        if self.spec.adapters_refused is not None:
            message = f"{param}: {self.spec.id!r} takes no other adapters: {self.spec.adapters_refused}"
            raise InvalidRequest(message, param=param)
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                return await asyncio.shield(self._shared_fetch(choice))
        except TimeoutError as error:
            message = f"{param}: not fetched within {self._wait_s:g} s, for all adapters of a request; send it again"
            raise AdapterNotFetched(message, param=param) from error
        except FetchInterrupted as error:
            raise AdapterNotFetched(f"{param}: {error.message}", param=param) from error
        except (FetchRefused, FetchFailed) as error:
            raise AdapterRejected(f"{param}: {error.message}", param=param) from error
        except AdapterRejected as error:
            raise AdapterRejected(f"{param}: {error.message.removeprefix('file: ')}", param=param) from error

    @property
    def _wait_s(self) -> float:
        return min(self.wait_s, self.settings.adapter_fetch_timeout_s)

    def _shared_fetch(self, choice: AdapterChoice) -> asyncio.Task[str]:
        digest = hashlib.sha256(f"{self.spec.id} {choice.place} {choice.name}".encode()).hexdigest()
        key = (self.queue, self.tenant, digest)
        task = _running.get(key)
        if task is None:
            task = _running[key] = asyncio.create_task(self._adapter_of(choice, digest))
            task.add_done_callback(partial(_forget, key))
        return task

    async def _adapter_of(self, choice: AdapterChoice, digest: str) -> str:
        """Return the id of the adapter that is stored for a choice, or of the one that is fetched."""
        known = await self.queue.adapters.source(self.tenant, digest)
        now = now_ms()
        if known is not None:
            is_fresh = now - known[0].checked_at_ms < 1000 * self.settings.adapter_recheck_s
            if (is_fresh or adapter_download.is_pinned(choice)) and await self._kept(known[0]):
                return known[0].adapter_id
        async with _turns.turn(self.tenant, 1):
            guard = self._guard()
            url = choice.url or adapter_download.hub_url(
                self.settings.adapter_hub_url, choice, choice.file or await self._only_file(choice, guard)
            )
            with tempfile.TemporaryFile() as file:
                return await self._download(url, file, guard, FetchedSource(digest, "", None, now), known)

    async def _download(
        self,
        url: str,
        file: BinaryIO,
        guard: FetchGuard,
        source: FetchedSource,
        known: tuple[FetchedSource, UploadedAdapter] | None,
    ) -> str:
        etag = None if known is None else known[0].etag
        found = await adapter_download.download(guard, url, file, self.settings.adapter_hosts, etag)
        source = replace(source, etag=found.etag)
        if known is not None and found.is_unchanged:
            if await self._kept(replace(source, adapter_id=known[1].id)):
                return known[1].id
            raise FetchInterrupted("its adapter was deleted at the same time")
        intake = AdapterIntake(self.tenant, self.queue, self.storage)
        sha256, tensors = await intake.check(file, found.size, self.spec)
        known = await self.queue.adapters.source(self.tenant, source.digest)  # another process can have been faster
        if known is not None and known[1].sha256 == sha256:
            source = replace(source, adapter_id=known[1].id)
            if await self._kept(source):
                return known[1].id
        token = token_in(tensors, adapter_download.file_name(url))
        adapter = self._new_adapter(url, found.size, sha256, token)
        file.seek(0)
        await intake.store(partial(asyncio.to_thread, file.read), adapter, replace(source, adapter_id=adapter.id))
        log.info("adapter_fetched", tenant=self.tenant, adapter=adapter.id, source=adapter.source, bytes=adapter.bytes)
        return adapter.id

    def _new_adapter(self, url: str, size: int, sha256: str, token: str | None) -> UploadedAdapter:
        return UploadedAdapter(
            id=new_id("adapter"),
            model=self.spec.id,
            name=adapter_download.file_name(url),
            token=token,
            max_scale=FETCHED_MAX_SCALE,
            bytes=size,
            parts=adapter_store.number_of_parts(size),
            sha256=sha256,
            created_at_ms=now_ms(),
            source=without_signature(url),
        )

    async def _kept(self, source: FetchedSource) -> bool:
        return await self.queue.adapters.keep(self.tenant, source)

    async def _only_file(self, choice: AdapterChoice, guard: FetchGuard) -> str:
        """Return the file of a repository that a choice does not name."""
        listing, url = io.BytesIO(), adapter_download.hub_listing_url(self.settings.adapter_hub_url, choice)
        short = replace(guard, rules=replace(guard.rules, max_bytes=_MAX_LISTING_BYTES))
        await adapter_download.download(short, url, listing, self.settings.adapter_hosts)
        return adapter_download.file_of(listing.getvalue())

    def _guard(self) -> FetchGuard:
        rules = FetchRules.for_adapters(self.settings)
        return FetchGuard(rules, tenant=self.tenant, until_s=time.monotonic() + rules.timeout_s)


def _forget(key: tuple[Queue, str, str], task: asyncio.Task[str]) -> None:
    _running.pop(key, None)
    if not task.cancelled():
        task.exception()  # those who wait for it raise it; after they have left nobody does
