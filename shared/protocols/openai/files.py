"""Files of the OpenAI protocol: what a batch reads, and what it writes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Literal

from shared.storage import Storage

PART_BYTES = 8 * 1024 * 1024
"""An uploaded file is stored in parts of so many bytes (the last may be shorter): none is ever in memory whole."""

CONTENT_TYPE = "application/jsonl"

Purpose = Literal["batch", "batch_output"]


@dataclass(frozen=True)
class Part:
    """One object in storage that holds the next `bytes` of a file; `name` is below the file's prefix."""

    name: str
    bytes: int


@dataclass(frozen=True)
class File:
    """A file of a tenant. `live` counts the batches that still read it."""

    id: str
    tenant: str
    filename: str
    purpose: Purpose
    bytes: int
    created_at_ms: int
    expires_at_ms: int
    live: int = 0


def prefix(tenant: str, file_id: str) -> str:
    """Return what the keys of a file's parts begin with."""
    return f"files/{tenant}/{file_id}/"


async def store_upload(
    pieces: AsyncIterator[bytes], storage: Storage, tenant: str, file_id: str, part_bytes: int = PART_BYTES
) -> list[Part]:
    """Write what `pieces` yields, in any sizes, as parts of `part_bytes`; holds no more than one of them."""
    parts: list[Part] = []
    held = bytearray()

    async def flush() -> None:
        part = Part(f"{len(parts):05d}.jsonl", len(held))
        await storage.put(prefix(tenant, file_id) + part.name, bytes(held), CONTENT_TYPE)
        parts.append(part)
        held.clear()

    async for piece in pieces:
        view = memoryview(piece)
        while len(view):
            taken = view[: part_bytes - len(held)]
            held += taken
            view = view[len(taken) :]
            if len(held) == part_bytes:
                await flush()
    if held or not parts:
        await flush()
    return parts


async def content(
    storage: Storage, tenant: str, file_id: str, parts: list[Part], start: int = 0
) -> AsyncGenerator[bytes]:
    """Yield a file's bytes from `start` on, piece by piece."""
    for part in parts:
        if start < part.bytes:
            async for piece in storage.stream(prefix(tenant, file_id) + part.name, start):
                yield piece
        start = max(0, start - part.bytes)
