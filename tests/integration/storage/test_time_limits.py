"""Time limits of storage: by size; a hanging call blocks neither the event loop nor its repetition."""

from __future__ import annotations

import asyncio
import io
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from shared.config.settings import Settings
from shared.errors import NotFound, StorageUnavailable
from shared.storage import Storage, connect

Eventually = Callable[..., Awaitable[None]]

TIMEOUT_S = 0.2


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    opened = connect(Settings(storage_dir=tmp_path, storage_timeout_s=TIMEOUT_S))
    yield opened
    await opened.close()


class HangingDisk:
    """Flushes hang until `resumed` is set; `renamed` are the files that were put in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resumed = threading.Event()
        self.renamed: list[str] = []
        fsync, replace = os.fsync, os.replace

        def hang(descriptor: int) -> None:
            self.resumed.wait()
            fsync(descriptor)

        def record(source: Path, target: Path) -> None:
            replace(source, target)
            self.renamed.append(target.name)

        monkeypatch.setattr(os, "fsync", hang)
        monkeypatch.setattr(os, "replace", record)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    hanging = HangingDisk(monkeypatch)
    yield hanging
    hanging.resumed.set()


async def test_a_large_object_may_take_longer_than_a_request(storage: Storage, disk: HangingDisk) -> None:
    data = bytes(4 * 1024 * 1024)
    threading.Timer(5 * TIMEOUT_S, disk.resumed.set).start()
    await storage.put("a/large", data, "application/octet-stream")
    assert await storage.read("a/large") == data


async def test_a_large_object_is_read_with_a_limit_for_each_piece(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(2 * 1024 * 1024)
    await storage.put("a/large", data, "application/octet-stream")

    class SlowFile(io.FileIO):
        def readinto(self, buffer: bytearray) -> int | None:  # type: ignore[override]
            time.sleep(TIMEOUT_S / 4)
            return super().readinto(buffer)

    monkeypatch.setattr("shared.storage.folder.open", lambda path, _: io.BufferedReader(SlowFile(path)), raising=False)
    assert await storage.read("a/large") == data
    assert await storage.read("a/large", 5, len(data)) == data[5:]


async def test_the_repetition_of_a_put_that_took_too_long_writes_no_second_time(
    storage: Storage, disk: HangingDisk
) -> None:
    with pytest.raises(StorageUnavailable, match="did not respond"):
        await storage.put("a/b", b"image", "image/odd")
    again = asyncio.create_task(storage.put("a/b", b"image", "image/odd"))
    await asyncio.sleep(0)
    disk.resumed.set()
    await again
    assert await storage.read("a/b") == b"image"
    assert disk.renamed.count("b") == 1


async def test_a_later_put_of_other_bytes_is_not_overtaken(storage: Storage, disk: HangingDisk) -> None:
    """Its thread starts when that of the earlier one has ended."""
    with pytest.raises(StorageUnavailable, match="did not respond"):
        await storage.put("a/b", b"first", "image/png")
    later = asyncio.create_task(storage.put("a/b", b"second", "image/png"))
    await asyncio.sleep(0)
    disk.resumed.set()
    await later
    assert await storage.read("a/b") == b"second"


async def test_a_put_that_found_no_thread_in_time_is_not_done_later(storage: Storage, disk: HangingDisk) -> None:
    puts = [storage.put(f"a/{number}", b"x", "image/png") for number in range(20)]
    errors = await asyncio.gather(*puts, return_exceptions=True)
    assert {type(error) for error in errors} == {StorageUnavailable}
    disk.resumed.set()
    await storage.put("a/last", b"x", "image/png")
    with pytest.raises(NotFound):
        await storage.read("a/19")


class HangingFile(io.RawIOBase):
    """A file on a mount that stopped responding: a read hangs until `resumed` is set."""

    def __init__(self) -> None:
        self.is_read, self.resumed = threading.Event(), threading.Event()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return offset

    def readinto(self, buffer: object) -> int:
        self.is_read.set()
        self.resumed.wait()
        return 0


async def test_a_stream_ends_while_its_read_hangs(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """Closing the file waits for the read, in a thread; the event loop goes on."""
    file = HangingFile()
    monkeypatch.setattr("shared.storage.folder.open", lambda *_: io.BufferedReader(file), raising=False)
    reading = asyncio.ensure_future(anext(storage.stream("a/b")))
    await asyncio.to_thread(file.is_read.wait)
    rescue = threading.Timer(5, file.resumed.set)  # of an event loop that is blocked
    rescue.start()
    reading.cancel()
    await asyncio.wait({reading})
    assert not file.resumed.is_set()
    rescue.cancel()
    file.resumed.set()
    await eventually(lambda: file.closed, "the file is closed")
