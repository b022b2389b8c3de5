"""The files of the jobs of a group, those of several jobs at a time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusequeue.errors import NotFound
from fusequeue.response_types import Job
from fusequeue.result_files import file_name, stem

if TYPE_CHECKING:
    from fusequeue.aio import AsyncClient

AT_ONCE = 8


@dataclass(frozen=True)
class GroupDownload:
    """How many files of a group were saved, and how many the folder had."""

    saved: int = 0
    kept: int = 0


async def save_group(client: AsyncClient, name: str, folder: Path, tenant: str | None) -> GroupDownload:
    """Save the files that the folder lacks; those of at most `AT_ONCE` jobs are in memory."""
    saved = kept = 0
    places = asyncio.Semaphore(AT_ONCE)

    async def save(job: Job) -> None:
        nonlocal saved
        try:
            files = await client.download(job, folder, name=stem(job), tenant=tenant)
            saved += len(files)  # read after the await: others count meanwhile
        except NotFound:
            pass  # it was deleted meanwhile
        finally:
            places.release()

    try:
        async with asyncio.TaskGroup() as running:
            await client.group(name, tenant=tenant)  # a name that is mistyped is an error
            async with aclosing(client.jobs(group=name, status="succeeded", tenant=tenant)) as jobs:
                async for job in jobs:
                    files = [folder / file_name(one, stem(job)) for one in job.artifacts if not one.was_sent]
                    if await asyncio.to_thread(lambda paths: all(map(Path.exists, paths)), files):
                        kept += len(files)
                        continue
                    await places.acquire()
                    running.create_task(save(job))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return GroupDownload(saved, kept)
