"""One run from its claim to its end, the engine's part played by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.queue import end, lose, put

from shared.config.models_file import ModelSpec
from shared.errors import StorageUnavailable
from shared.job import InputRef, State
from shared.queue import Claim, Queue, Submission
from shared.storage.folder import FolderStorage
from worker.engine import EngineRequest, JobFinished, Output
from worker.job_runner import ClaimedJob, JobRunner, StopReason
from worker.output.upload import Uploader

Eventually = Callable[..., Awaitable[None]]
MADE = Output(np.zeros((64, 64, 3), np.uint8))
WORKER = "w1"


class Seats:
    """Takes seats, and leaves it to the test to make their pictures."""

    def __init__(self) -> None:
        self.taken: list[EngineRequest] = []

    def submit(self, seat: EngineRequest) -> None:
        self.taken.append(seat)


class SlowFolder(FolderStorage):
    """Storage whose writes wait until they are let through, and go on when nobody waits for them any more."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, timeout_s=10)
        self.asked, self.open = asyncio.Event(), asyncio.Event()

    async def put(self, key: str, data: bytes, content_type: str) -> None:
        self.asked.set()
        writing = asyncio.ensure_future(self._put_later(key, data, content_type))
        await asyncio.shield(writing)

    async def _put_later(self, key: str, data: bytes, content_type: str) -> None:
        await self.open.wait()
        await super().put(key, data, content_type)


@dataclass
class House:
    queue: Queue
    storage: SlowFolder
    delivery: Uploader
    root: Path
    seats: Seats

    async def claimed(self, worker: str = WORKER) -> Claim:
        (one,) = await self.queue.claims.claim(worker, ["demo"], 8)
        return one

    def serve(self, claim: Claim) -> tuple[ClaimedJob, asyncio.Task[None]]:
        run = ClaimedJob(claim, ModelSpec(id="demo", source="none"))
        service = JobRunner(self.queue, self.storage, self.seats, WORKER)  # type: ignore[arg-type]
        return run, asyncio.create_task(service.run(run))

    async def finish(self, run: ClaimedJob, serving: asyncio.Task[None]) -> None:
        run.upload(self.delivery, 0, MADE)
        run.engine_done.set_result(JobFinished(run.key))
        async with asyncio.timeout(10):
            await serving

    def stored(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in (self.root / "jobs").rglob("*.*"))


@pytest.fixture
async def house(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[House]:
    storage = SlowFolder(tmp_path)
    storage.open.set()
    delivery = Uploader(storage, 10**8)
    yield House(fake_queue, storage, delivery, tmp_path, Seats())
    delivery.close()
    await storage.close()


async def test_a_job_that_is_settled_keeps_its_pictures(house: House, make_submission: Any) -> None:
    """The record points to what is stored."""
    (job_id,) = await put(house.queue, make_submission())
    await house.finish(*house.serve(await house.claimed()))
    record = await house.queue.jobs.get(job_id)
    assert record is not None
    assert (record.state, [one.key for one in record.artifacts]) == (State.SUCCEEDED, house.stored())


@pytest.mark.parametrize("deleted", [False, True])
async def test_what_a_lost_claim_stored_is_removed(house: House, make_submission: Any, deleted: bool) -> None:
    """A worker that was frozen wakes: its job has run elsewhere, and may be deleted, so that no sweep comes again."""
    (job_id,) = await put(house.queue, make_submission())
    run, serving = house.serve(await house.claimed())
    await lose(house.queue, job_id)
    assert await house.queue.maintenance.reclaim() == [job_id]
    other = await house.claimed("w2")
    await house.storage.put(f"jobs/{job_id}/{other.attempt}/0.png", b"its own", "image/png")
    assert await end(house.queue, other, "w2")
    if deleted:
        await house.storage.delete_prefix(f"jobs/{job_id}/")
        assert await house.queue.jobs.forget(job_id)
    await house.finish(run, serving)
    assert house.stored() == ([] if deleted else [f"jobs/{job_id}/{other.attempt}/0.png"])


async def test_an_upload_under_way_when_the_claim_is_lost_is_removed_too(
    house: House, make_submission: Any, eventually: Eventually
) -> None:
    """Nothing can call it back: it is waited for."""
    (job_id,) = await put(house.queue, make_submission())
    run, serving = house.serve(await house.claimed())
    house.storage.open.clear()
    finishing = asyncio.create_task(house.finish(run, serving))
    await house.storage.asked.wait()
    await lose(house.queue, job_id)
    await house.queue.maintenance.reclaim()
    await house.claimed("w2")
    run.stop(StopReason.LOST)
    await asyncio.sleep(0.05)
    house.storage.open.set()
    await finishing
    assert house.stored() == []


async def test_a_claim_that_is_given_back_is_left_to_the_next(house: House, make_submission: Any) -> None:
    """A drain has no time to tidy up; the job's retention does."""
    (job_id,) = await put(house.queue, make_submission())
    claim = await house.claimed()
    run, serving = house.serve(claim)
    run.stop(StopReason.RELEASED)
    await house.queue.claims.release(WORKER, {job_id: claim.epoch})
    await house.finish(run, serving)
    record = await house.queue.jobs.get(job_id)
    assert record is not None
    assert record.state is State.QUEUED


async def test_a_job_is_canceled_while_its_picture_cannot_be_read(
    house: House, make_submission: Callable[..., Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage may be away for long; who cancels does not wait for it."""
    reads = 0

    async def away(key: str, start: int = 0, end: int | None = None) -> bytes:
        nonlocal reads
        reads += 1
        raise StorageUnavailable("away")

    monkeypatch.setattr(house.storage, "read", away)
    image = InputRef(id="in_1", key="inputs/a/b", content_type="image/png", bytes=1, width=64, height=64)
    (job_id,) = await put(house.queue, make_submission(images=(image,)))
    run, serving = house.serve(await house.claimed())
    async with asyncio.timeout(10):
        while not reads:
            await asyncio.sleep(0.01)
        run.stop(StopReason.CANCELED)
        await serving
    record = await house.queue.jobs.get(job_id)
    assert record is not None
    assert record.state is State.CANCELED
    assert house.seats.taken == []


async def test_all_inputs_are_fetched_and_the_one_that_is_gone_is_named(house: House, make_submission: Any) -> None:
    """In the order in which they were sent; without one of them nothing is made."""
    names = ("first", "second", "mask", "last")
    refs = {
        name: InputRef(id=f"in_{name}", key=f"inputs/{name}.png", content_type="image/png", bytes=1, width=1, height=1)
        for name in names
    }
    for name in names:
        await house.storage.put(refs[name].key, name.encode(), "image/png")
    pictures = {"images": (refs["second"], refs["first"]), "mask": refs["mask"], "last_image": refs["last"]}
    await put(house.queue, make_submission(**pictures))
    run, serving = house.serve(await house.claimed())
    async with asyncio.timeout(10):
        while not house.seats.taken:
            await asyncio.sleep(0.01)
    (seat,) = house.seats.taken
    assert (seat.inputs.images, seat.inputs.mask, seat.inputs.last_image) == ((b"second", b"first"), b"mask", b"last")
    await house.finish(run, serving)

    for gone, param in (("first", "images.1"), ("mask", "mask"), ("last", "last_image")):
        await house.storage.delete_prefix(refs[gone].key)
        (job_id,) = await put(house.queue, make_submission(**pictures))
        _, serving = house.serve(await house.claimed())
        async with asyncio.timeout(10):
            await serving
        record = await house.queue.jobs.get(job_id)
        assert record is not None
        assert record.error is not None
        assert (record.error.code, record.error.param) == ("input_missing", param)
        await house.storage.put(refs[gone].key, gone.encode(), "image/png")
