"""Lists of videos, batches and files: OpenAI's SDKs take an empty page for the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from harness.queue import put
from integration.batches.batch_steps import create, line

from api.protocols.openai.batches.batch_files import BatchContext
from shared.batch import File
from shared.queue import Submission
from shared.runtime.clock import new_id, now_ms
from shared.tasks import Task

COUNT = 9
Page = Callable[[str | None], Awaitable[tuple[list[Any], bool]]]


@pytest.fixture(params=["videos", "batches", "files"])
async def listed(
    request: pytest.FixtureRequest, context: BatchContext, make_submission: Callable[..., Submission]
) -> tuple[list[str], Callable[[str], str], Page]:
    """Ids of objects, newest first, the key of each, and a function for pages of two."""
    queue, keys = context.queue, context.queue.client.redis_keys
    if request.param == "videos":
        films = [make_submission(task=Task.TEXT_TO_VIDEO, created_at_ms=1000 + at) for at in range(COUNT)]
        ids = await put(queue, *films)
        return ids[::-1], keys.job, lambda after: queue.jobs.video_page("default", after, 2, True)
    batches = [await create(context, "default", [line(1)]) for _ in range(COUNT)]
    if request.param == "batches":
        return batches[::-1], partial(keys.batch, "default"), lambda after: queue.batches.page("default", after, 2)
    files = [(await queue.batches.get("default", one)).input_file_id for one in batches]
    return files[::-1], partial(keys.file, "default"), lambda after: queue.files.page("default", after, 2, True)


async def test_objects_that_have_expired_do_not_end_a_list(
    listed: tuple[list[str], Callable[[str], str], Page], context: BatchContext
) -> None:
    """Their records are gone before their rows in the index."""
    ids, key, page = listed
    await context.queue.client.redis.delete(*(key(one) for one in (*ids[1:6], ids[8])))
    seen: list[str] = []
    more = True
    while more:
        objects, more = await page(seen[-1] if seen else None)
        assert objects
        seen += [getattr(one, "job", one).id for one in objects]
    assert seen == [ids[0], *ids[6:8]]


async def test_a_list_goes_on_after_a_file_that_was_deleted(context: BatchContext) -> None:
    """The id of a batch's output is as old as the batch, and the file as new as its end."""
    files, now = context.queue.files, now_ms()
    ids = [new_id("file", now - age_ms) for age_ms in (3000, 2000, 1000)]
    for file_id, created_ms in zip(ids, (now, now - 2000, now - 1000), strict=True):
        file = File(
            id=file_id,
            tenant="default",
            filename="out.jsonl",
            purpose="batch_output",
            bytes=0,
            created_at_ms=created_ms,
            expires_at_ms=now + 600_000,
        )
        await files.put(file)
    seen: list[str] = []
    more = True
    while more:
        (file,), more = await files.page("default", seen[-1] if seen else None, 1, True)
        await files.forget("default", file.id)
        seen.append(file.id)
    assert sorted(seen) == sorted(ids)
