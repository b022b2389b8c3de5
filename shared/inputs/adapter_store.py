"""Files of uploaded adapters in storage: parts of a fixed size, so that only one is in memory."""

from collections.abc import AsyncGenerator, Awaitable, Callable

from shared.storage import Storage

PART_BYTES = 8 * 1024 * 1024

_CONTENT_TYPE = "application/octet-stream"


def prefix(tenant: str, adapter_id: str) -> str:
    """Return the storage prefix of an adapter's parts."""
    return f"adapters/{tenant}/{adapter_id}/"


def number_of_parts(size: int) -> int:
    return -(-size // PART_BYTES)


async def store_parts(read: Callable[[int], Awaitable[bytes]], storage: Storage, tenant: str, adapter_id: str) -> None:
    """Store a file as its parts; `read` returns the next bytes of it, at most as many as it is asked for."""
    number = 0
    while part := await read(PART_BYTES):
        await storage.put(_key(tenant, adapter_id, number), part, _CONTENT_TYPE)
        number += 1


async def stored_chunks(storage: Storage, tenant: str, adapter_id: str, parts: int) -> AsyncGenerator[bytes]:
    """Yield the bytes of a stored file; raises `NotFound`."""
    for number in range(parts):
        async for chunk in storage.stream(_key(tenant, adapter_id, number)):
            yield chunk


def _key(tenant: str, adapter_id: str, number: int) -> str:
    return f"{prefix(tenant, adapter_id)}{number:05d}.part"
