"""Handles of jobs, against the real API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fusequeue import AsyncClient, InvalidArgument, JobFailed, NotFound, WaitTimeout

PROMPT = "a red circle on a blue ground, left"
Work = Callable[..., Awaitable[bytes]]


async def test_a_handle_waits_for_the_result_of_its_job_and_saves_it(
    api: AsyncClient, work: Work, tmp_path: Path
) -> None:
    handle = api.job(await api.submit("demo", PROMPT, seed=7))
    assert handle.status == "queued"
    waiting = asyncio.create_task(handle.result(folder=tmp_path / "new"))
    data = await work()
    result = await waiting
    assert (result.data, [file.name for file in result.files]) == ((data,), [f"{handle.id}-0.png"])
    assert handle.status == "succeeded"
    assert [file.name for file in await handle.download(tmp_path, name="again")] == ["again-0.png"]


async def test_a_handle_of_an_id_reads_nothing_until_it_is_used(api: AsyncClient) -> None:
    job = await api.submit("demo", PROMPT)
    handle = api.job(job.id)
    assert (handle.id, handle.latest, handle.status) == (job.id, None, None)
    assert repr(handle) == f"<AsyncJobHandle {job.id}: not read>"
    assert (await handle.refresh()).prompt == PROMPT
    assert repr(handle) == f"<AsyncJobHandle {job.id}: queued>"
    with pytest.raises(NotFound):
        await api.job("job_none").refresh()


async def test_a_handle_changes_its_job_and_keeps_what_the_service_returned(api: AsyncClient) -> None:
    handle = api.job(await api.submit("demo", PROMPT))
    await handle.pause()
    assert handle.latest is not None
    assert handle.latest.paused_at is not None
    assert (await handle.resume()).paused_at is None
    with pytest.raises(WaitTimeout):
        await handle.wait(timeout_s=0)
    await handle.cancel()
    assert handle.status == "canceled"
    with pytest.raises(JobFailed):
        await handle.result()
    await handle.delete()
    with pytest.raises(NotFound):
        await handle.refresh()


async def test_the_events_of_a_handle_end_with_its_job(api: AsyncClient, work: Work) -> None:
    handle = api.job((await api.submit("demo", PROMPT)).id)
    working = asyncio.create_task(work())
    seen = [event.status async for event in handle.events()]
    await working
    assert (seen[-1], handle.status) == ("succeeded", "succeeded")


@pytest.mark.parametrize("job", ["", "..", None, 7])
async def test_a_handle_of_what_is_no_job_is_refused(api: AsyncClient, job: Any) -> None:
    with pytest.raises(InvalidArgument, match="invalid id"):
        api.job(job)
