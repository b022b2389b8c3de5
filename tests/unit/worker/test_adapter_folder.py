"""Files of uploaded adapters on a worker's disk: fetched once, bounded, and removed."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.config.adapters import Adapter, UploadedAdapter
from shared.errors import AdapterUnavailable
from shared.inputs import adapter_store
from shared.job import Job
from shared.queue import Queue
from shared.runtime.clock import new_id, now_ms
from shared.storage.folder import FolderStorage
from worker.adapter_folder import AdapterFolder


@dataclass
class FolderHarness:
    queue: Queue
    storage: FolderStorage
    parent: Path
    folder: AdapterFolder

    async def uploaded(self, content: bytes = b"weights", sha256: str | None = None) -> str:
        adapter_id, chunks = new_id("adapter"), [content]

        async def read(_most: int) -> bytes:
            return chunks.pop() if chunks else b""

        await adapter_store.store_parts(read, self.storage, "acme", adapter_id)
        digest = hashlib.sha256(content).hexdigest() if sha256 is None else sha256
        fields = {"model": "demo", "name": "x", "bytes": len(content), "parts": 1, "sha256": digest}
        await self.queue.adapters.begin("acme", adapter_id, len(content), 1)
        await self.queue.adapters.put("acme", UploadedAdapter(id=adapter_id, created_at_ms=now_ms(), **fields))
        return adapter_id

    def files(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted(self.parent.rglob("*.safetensors"))]


def job_with(*adapter_ids: str, tenant: str = "acme") -> Job:
    adapters = tuple(Adapter(id=one) for one in adapter_ids)
    fields = {"model": "demo", "width": 64, "height": 64, "prompt": "x", "seed": 1, "steps": 1, "guidance_scale": 1}
    return Job(id=new_id("job"), tenant=tenant, created_at_ms=0, adapters=adapters, **fields)


@pytest.fixture
async def harness(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[FolderHarness]:
    storage, parent = FolderStorage(tmp_path / "storage", timeout_s=10), tmp_path / "adapters"
    harness = FolderHarness(fake_queue, storage, parent, AdapterFolder(fake_queue, storage, 20, parent))
    yield harness
    harness.folder.close()
    await storage.close()


async def test_a_job_gets_its_adapters_as_files(harness: FolderHarness) -> None:
    """The file stays for the next job; at the end nothing is left."""
    adapter_id = await harness.uploaded()
    for _ in range(2):
        async with harness.folder.held(job_with(adapter_id), lambda: False) as (spec,):
            assert (spec.id, Path(spec.source).read_bytes()) == (adapter_id, b"weights")
    assert harness.files() == [b"weights"]
    harness.folder.close()
    assert list(harness.parent.iterdir()) == []


async def test_files_above_the_limit_are_removed_when_unused(harness: FolderHarness) -> None:
    """The least recently used first; those of a running job stay, also above the limit."""
    first, second, third = [await harness.uploaded(bytes([at]) * 10) for at in range(3)]
    for one in (first, second, first):
        async with harness.folder.held(job_with(one), lambda: False):
            pass
    async with harness.folder.held(job_with(third), lambda: False):
        pass
    assert sorted(harness.files()) == [b"\0" * 10, b"\2" * 10]
    async with harness.folder.held(job_with(first, second, third), lambda: False) as specs:
        assert [Path(spec.source).is_file() for spec in specs] == [True] * 3


async def test_jobs_that_end_at_the_same_time_remove_unused_files_once(harness: FolderHarness) -> None:
    """Each of them waits for the disk while the other one looks for files to remove."""
    kept = [await harness.uploaded(bytes([at]) * 10) for at in range(4)]
    for one in kept[:2]:
        async with harness.folder.held(job_with(one), lambda: False):
            pass
    both = asyncio.Barrier(2)

    async def run(adapter_id: str) -> None:
        async with harness.folder.held(job_with(adapter_id), lambda: False):
            await both.wait()

    await asyncio.gather(*map(run, kept[2:]))
    assert sorted(harness.files()) == [b"\2" * 10, b"\3" * 10]


async def test_a_deleted_adapter_fails_the_job(harness: FolderHarness) -> None:
    """The same for one of another tenant, and for one whose parts are gone."""
    adapter_id = await harness.uploaded()
    gone = await harness.uploaded()
    await harness.storage.delete_prefix(adapter_store.prefix("acme", gone))
    for job in (job_with(new_id("adapter")), job_with(adapter_id, tenant="other"), job_with(gone)):
        with pytest.raises(AdapterUnavailable, match="has been deleted") as failed:
            async with harness.folder.held(job, lambda: False):
                pass
        assert failed.value.param == "adapters"
    assert harness.files() == []


async def test_a_damaged_file_fails_the_job_and_is_not_kept(harness: FolderHarness) -> None:
    adapter_id = await harness.uploaded(sha256="0" * 64)
    with pytest.raises(AdapterUnavailable, match="is damaged in storage"):
        async with harness.folder.held(job_with(adapter_id), lambda: False):
            pass
    assert harness.files() == []


async def test_leftovers_of_killed_workers_are_removed(harness: FolderHarness) -> None:
    """Those of living ones stay."""
    script = (
        "import os, sys; from pathlib import Path; from worker.adapter_folder import _LockedFolder\n"
        "folder = _LockedFolder(Path(sys.argv[1])); folder.create()\n"
        "(folder.path / 'x.safetensors').write_bytes(b'left'); os._exit(9)"
    )
    command = [sys.executable, "-c", script, str(harness.parent)]
    await asyncio.to_thread(subprocess.run, command, check=False, timeout=60)
    async with harness.folder.held(job_with(await harness.uploaded()), lambda: False):
        assert sorted(harness.files()) == [b"left", b"weights"]
        AdapterFolder(harness.queue, harness.storage, 20, harness.parent).remove_leftovers()
        assert harness.files() == [b"weights"]
