"""Lists of videos, batches and files: OpenAI's SDKs take an empty page for the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from harness.queue import put
from integration.batches.batch_steps import create, line

from shared.job import Task
from shared.queue import Submission
from worker.chores.batch_files import BatchContext

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
