"""When each periodic chore last ended without an error, for the metrics of the API."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api import background
from api.chores import maintenance, webhooks
from api.chores.rq_queue import ChoreQueue
from api.chores.schedule import due_chores
from api.protocols.openai.batches import batch_pass
from shared.errors import StorageUnavailable
from shared.queue import Queue
from shared.queue.maintenance.maintenance import CHORES


@pytest.fixture(autouse=True)
def environment(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let chores work on the queue of the test, and end what they leave in the background."""
    settings = queue.client.settings
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", settings.redis_url)
    monkeypatch.setenv("FUSEQUEUE_NAMESPACE", settings.namespace)
    monkeypatch.setenv("FUSEQUEUE_STORAGE_DIR", str(tmp_path / "objects"))
    yield
    background.close_all()


async def ended(queue: Queue) -> set[str]:
    """Return the chores that have ended within a minute."""
    return {chore for chore, age_s in (await queue.maintenance.chore_ages_s()).items() if age_s < 60}


async def add_work(queue: Queue) -> None:
    """Let webhooks and batches of a tenant be pending."""
    keys = queue.client.redis_keys
    for name in (keys.outbox_tenants, keys.batch_tenants):
        await queue.client.redis.zadd(name, {"default": 1})


async def test_a_chore_that_never_ended_is_infinitely_old(queue: Queue) -> None:
    """Unless it has no work."""
    assert await queue.maintenance.chore_ages_s() == {
        chore: 0.0 if chore in ("deliver", "advance") else math.inf for chore in CHORES
    }
    await add_work(queue)
    assert await queue.maintenance.chore_ages_s() == dict.fromkeys(CHORES, math.inf)


async def test_each_chore_is_recorded_when_it_ends(queue: Queue) -> None:
    await add_work(queue)
    until_s = time.time() + 60
    await asyncio.to_thread(maintenance.move_on)
    assert await ended(queue) == {"move-on"}
    await asyncio.to_thread(maintenance.sweep, "sweep-1", 0, until_s)
    await asyncio.to_thread(maintenance.reconcile, "reconcile-1", 0, until_s)
    assert await ended(queue) == {"move-on", "sweep", "reconcile"}
    for run, chore in ((webhooks.deliver, "deliver"), (batch_pass.advance, "advance")):
        await asyncio.to_thread(run)
        await add_work(queue)
        assert chore in await ended(queue)


async def test_a_chore_that_fails_is_not_recorded(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "objects").write_text("not a folder")
    with pytest.raises(StorageUnavailable):
        await asyncio.to_thread(maintenance.sweep, "sweep-1", 0, time.time() + 60)
    assert "sweep" not in await ended(queue)


def test_every_scheduled_chore_has_a_time() -> None:
    scheduled = [one for kind in ChoreQueue for one in due_chores(kind, 1000.0, None, "a")]
    assert {one.chore_id.partition("-start-")[0] for one in scheduled} == set(CHORES)
