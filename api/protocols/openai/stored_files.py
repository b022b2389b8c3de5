"""Files of the OpenAI protocol: the input and output of batches, stored in parts."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.batch import Part, file_prefix
from shared.storage import Storage

PART_BYTES = 8 * 1024 * 1024
"""Size of the parts of an upload: at most one part is in memory."""

CONTENT_TYPE = "application/jsonl"


class ExpiresAfter(BaseModel):
    """How long a file is kept; OpenAI's bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    anchor: Literal["created_at"]
    seconds: int = Field(strict=True, ge=3_600, le=30 * 86_400)


@dataclass(frozen=True, slots=True)
class FileLine:
    """Line `number`, from 1; `end` is the offset after it. `raw` is None for a line that is too long."""

    number: int
    end: int
    raw: bytes | None

    @property
    def blank(self) -> bool:
        return self.raw is not None and not self.raw


async def store_upload(
    chunks: AsyncIterator[bytes], storage: Storage, tenant: str, file_id: str, part_bytes: int = PART_BYTES
) -> list[Part]:
    """Store `chunks` of any sizes as parts of `part_bytes`; the last part can be shorter."""
    parts: list[Part] = []
    buffer = bytearray()

    async def flush() -> None:
        part = Part(f"{len(parts):05d}.jsonl", len(buffer))
        await storage.put(file_prefix(tenant, file_id) + part.name, bytes(buffer), CONTENT_TYPE)
        parts.append(part)
        buffer.clear()

    async for chunk in chunks:
        view = memoryview(chunk)
        while len(view):
            head = view[: part_bytes - len(buffer)]
            buffer += head
            view = view[len(head) :]
            if len(buffer) == part_bytes:
                await flush()
    if buffer or not parts:
        await flush()
    return parts


async def content(
    storage: Storage, tenant: str, file_id: str, parts: list[Part], start: int = 0
) -> AsyncGenerator[bytes]:
    """Yield a file's bytes from offset `start`."""
    for part in parts:
        if start < part.bytes:
            async for chunk in storage.stream(file_prefix(tenant, file_id) + part.name, start):
                yield chunk
        start = max(0, start - part.bytes)


async def read_lines(chunks: AsyncIterator[bytes], offset: int, max_bytes: int) -> AsyncGenerator[FileLine]:
    """Yield the lines of `chunks`, which start at `offset`; holds at most one chunk and one line of `max_bytes`."""
    buffer, number, too_long = bytearray(), 0, False

    def line(end: int) -> FileLine:
        return FileLine(number, end, None if too_long else bytes(buffer).strip(b" \t\r"))

    async for chunk in chunks:
        start = 0
        while (stop := chunk.find(b"\n", start)) >= 0:
            too_long = too_long or len(buffer) + stop - start > max_bytes
            if not too_long:
                buffer += chunk[start:stop]
            number += 1
            yield line(offset + stop + 1)
            buffer.clear()
            start, too_long = stop + 1, False
        too_long = too_long or len(buffer) + len(chunk) - start > max_bytes
        if too_long:
            buffer.clear()
        else:
            buffer += chunk[start:]
        offset += len(chunk)
    if buffer or too_long:
        number += 1
        yield line(offset)
