"""Takes the adapter file of a tenant, uploaded or fetched: its checks, and its way into the storage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

from shared.config.adapters import UploadedAdapter
from shared.config.model_spec import ModelSpec
from shared.errors import AdapterRejected, FusequeueError, InvalidRequest
from shared.inputs import adapter_store
from shared.inputs.adapter_check import check_file, check_layers, shapes_of
from shared.inputs.embedding_check import is_embedding, token_of
from shared.inputs.formats.safetensors import TensorEntry
from shared.queue import Queue
from shared.queue.tenants.adapters import FetchedSource
from shared.runtime.shares import SharedPool, SharedTurns
from shared.storage import Storage

_CHECKS = 2  # of files at the same time in this process: each reads and hashes 300 MB a second
_turns = SharedTurns(SharedPool("adapter_checks", _CHECKS), max_waiting=64, timeout_s=30.0)
_threads = ThreadPoolExecutor(_CHECKS, "adapter-check")


def token_in(tensors: Sequence[TensorEntry], file_name: str, given: str | None = None) -> str | None:
    """Return the word of an embedding, by default that of its file; None for a LoRA. Raises `InvalidRequest`."""
    shapes = shapes_of(tensors)
    if not is_embedding(shapes):
        if given is not None:
            raise InvalidRequest("token: only an embedding has one, and the file holds LoRA weights", param="token")
        return None
    token = given or token_of(shapes, file_name)
    if token is None:
        message = "file: neither its tensor nor its name is a word that can stand for the embedding in a prompt"
        raise AdapterRejected(f"{message}; upload it with a token", param="file")
    return token


@dataclass(frozen=True)
class AdapterIntake:
    """The adapters of one tenant."""

    tenant: str
    queue: Queue
    storage: Storage

    async def check(
        self, file: BinaryIO, size: int, spec: ModelSpec, component: str | None = None
    ) -> tuple[str, Sequence[TensorEntry]]:
        """Return the SHA-256 and the tensors of a file for a model; raises `AdapterRejected` or `Overloaded`."""
        async with _turns.turn(self.tenant, 1):
            loop = asyncio.get_running_loop()
            sha256, tensors = await loop.run_in_executor(_threads, check_file, file, size)
        check_layers(tensors, await self.queue.adapters.layers(spec), component)
        return sha256, tensors

    async def store(
        self,
        read: Callable[[int], Awaitable[bytes]],
        adapter: UploadedAdapter,
        source: FetchedSource | None = None,
    ) -> None:
        """Store an adapter; the retention sweep removes what a killed process leaves.

        Raises `Conflict` for a tenant with too many, or `QuotaExceeded`.
        """
        adapters = self.queue.adapters
        await adapters.begin(self.tenant, adapter.id, adapter.bytes, adapter.parts)
        try:
            await adapter_store.store_parts(read, self.storage, self.tenant, adapter.id)
            await adapters.put(self.tenant, adapter, source)
        except FusequeueError:
            with contextlib.suppress(FusequeueError):
                await adapters.abandon(self.tenant, adapter.id)
            raise
