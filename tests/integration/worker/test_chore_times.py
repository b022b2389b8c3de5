"""When each periodic chore last ended without an error, for the metrics of the API."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import pytest

from shared.errors import StorageUnavailable
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.queue import Queue
from shared.queue.maintenance.maintenance import CHORES
from worker.chores import maintenance, rq_queue
from worker.chores.rq_queue import ChoreQueue
from worker.chores.schedule import Schedule, due_chores
from worker.chores.webhooks import DeliveryPass


@pytest.fixture(autouse=True)
def environment(queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = queue.client.settings
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", settings.redis_url)
    monkeypatch.setenv("FUSEQUEUE_NAMESPACE", settings.namespace)
    monkeypatch.setenv("FUSEQUEUE_STORAGE_DIR", str(tmp_path / "objects"))


async def ended(queue: Queue) -> set[str]:
    """Return the chores that have ended within a minute."""
    return {chore for chore, age_s in (await queue.maintenance.chore_ages_s()).items() if age_s < 60}


async def test_a_chore_that_never_ended_is_infinitely_old(queue: Queue) -> None:
    assert await queue.maintenance.chore_ages_s() == dict.fromkeys(CHORES, math.inf)


async def test_each_chore_is_recorded_when_it_ends(queue: Queue) -> None:
    until_s = time.time() + 60
    await asyncio.to_thread(maintenance.move_on)
    assert await ended(queue) == {"move-on"}
    await asyncio.to_thread(maintenance.sweep, "sweep-1", 0, until_s)
    await asyncio.to_thread(maintenance.reconcile, "reconcile-1", 0, until_s)
    assert await ended(queue) == {"move-on", "sweep", "reconcile"}
    await DeliveryPass(queue, FetchGuard(FetchRules.for_webhooks(queue.client.settings)), "").run()
    assert await ended(queue) == {"move-on", "sweep", "reconcile", "deliver"}


async def test_a_chore_that_fails_is_not_recorded(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "objects").write_text("not a folder")
    with pytest.raises(StorageUnavailable):
        await asyncio.to_thread(maintenance.sweep, "sweep-1", 0, time.time() + 60)
    assert await ended(queue) == set()


async def test_chores_without_work_count_as_ended(queue: Queue) -> None:
    settings = queue.client.settings
    with rq_queue.connect(settings) as connection:
        for kind in (ChoreQueue.WEBHOOKS, ChoreQueue.BATCHES):
            await asyncio.to_thread(Schedule(settings, connection, kind).tick, 1000.0)
    assert await ended(queue) == {"deliver", "advance"}


def test_every_scheduled_chore_has_a_time() -> None:
    scheduled = [one for kind in ChoreQueue for one in due_chores(kind, 1000.0, None, "a")]
    assert {one.chore_id.partition("-start-")[0] for one in scheduled} == set(CHORES)
