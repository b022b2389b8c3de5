"""Checkpoints between workers: what is stored, who may name it, who continues from it, and when it is deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from harness.queue import claim as claim_jobs
from harness.queue import lose
from harness.stub_engine import StubEngine, StubFleet

from api.chores.retention import sweep_chunk
from shared.config.model_spec import ModelSpec
from shared.job import Job, State
from shared.job_record import JobRecord
from shared.queue import Queue
from shared.queue.checkpoints import checkpoint_prefix
from worker.claims import checkpoint_store
from worker.claims.claimed_job import ClaimedJob
from worker.engine.protocol import CheckpointTaken, ImageCheckpoint

Eventually = Callable[..., Awaitable[None]]
MakeJob = Callable[..., Job]
STATE = b"seven b"


@pytest.fixture
async def fleet(queue: Queue, tmp_path: Path) -> AsyncIterator[StubFleet]:
    fleet = StubFleet(queue, tmp_path, drain_timeout_s=0.5)
    yield fleet
    await fleet.close()


class Scene:
    """One job, and the files of its checkpoints."""

    def __init__(self, fleet: StubFleet, job: Job, eventually: Eventually) -> None:
        self.fleet, self.job, self.eventually = fleet, job, eventually
        self.folder = fleet.settings.storage_dir / checkpoint_prefix(job.id)

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.exists() else []

    async def record(self) -> JobRecord:
        record = await self.fleet.queue.jobs.get(self.job.id)
        assert record is not None
        return record

    async def stored(self) -> str | None:
        """Return what the record says of its checkpoint."""
        return await self.fleet.queue.client.redis.hget(
            self.fleet.queue.client.redis_keys.job(self.job.id), "checkpoint"
        )

    async def submitted(self, engine: StubEngine, epoch: int = 1) -> str:
        key = f"{self.job.id}:{epoch}"
        await self.eventually(lambda: key in engine.requests, f"{key} runs")
        return key

    async def keep(self, engine: StubEngine, key: str, *files: bytes | None) -> None:
        before = await self.stored()
        engine.checkpoint(key, *files)
        await self.eventually(lambda: _differs(self.stored(), before), "the record names a checkpoint")

    async def finish(self, engine: StubEngine, epoch: int) -> JobRecord:
        key = await self.submitted(engine, epoch)
        engine.finish(key)
        await self.eventually(lambda: self._ended(), "the job has ended")
        return await self.record()

    async def _ended(self) -> bool:
        return (await self.record()).state.terminal


async def _differs(value: Awaitable[Any], other: Any) -> bool:
    return bool(await value != other)


@pytest.fixture
async def scene(fleet: StubFleet, make_job: MakeJob, eventually: Eventually) -> Scene:
    scene = Scene(fleet, make_job(), eventually)
    await fleet.submit(scene.job)
    return scene


async def drained(scene: Scene, *files: bytes | None) -> None:
    """Run the job on a worker that is drained after `files` are its state."""
    worker, engine, running = scene.fleet.start("demo")
    key = await scene.submitted(engine)
    engine.states[key] = files
    for step in (1, 2):
        engine.step(key, step, 10_000)
        await asyncio.sleep(0.05)
    worker.drain()
    async with asyncio.timeout(10):
        assert await running == 0


async def test_a_drain_hands_over_a_job_that_takes_longer_and_the_next_claim_continues_it(scene: Scene) -> None:
    await drained(scene, STATE)
    record = await scene.record()
    assert (record.state, record.attempts, record.losses) == (State.QUEUED, 0, 0)
    async with scene.fleet.worker("demo") as (_, engine):
        key = await scene.submitted(engine, 2)
        assert engine.requests[key].checkpoints == (STATE,)
        record = await scene.finish(engine, 2)
    assert (record.state, record.attempts, record.resumed_steps) == (State.SUCCEEDED, 1, len(STATE))


async def test_a_job_that_ends_within_the_drain_is_not_handed_over(scene: Scene) -> None:
    worker, engine, running = scene.fleet.start("demo")
    key = await scene.submitted(engine)
    for step in (8, 9):
        engine.step(key, step, 10)
        await asyncio.sleep(0.01)
    worker.drain()
    await asyncio.sleep(0.1)
    engine.finish(key)
    assert await running == 0
    assert (await scene.record()).state is State.SUCCEEDED
    assert await scene.stored() is None


async def test_a_drain_without_a_state_begins_the_job_anew(scene: Scene) -> None:
    await drained(scene)
    async with scene.fleet.worker("demo") as (_, engine):
        key = await scene.submitted(engine, 2)
        assert engine.requests[key].checkpoints == ()
        assert (await scene.finish(engine, 2)).resumed_steps == 0


@pytest.mark.parametrize("fault", ["tampered", "truncated", "longer", "foreign", "missing"])
async def test_a_file_that_is_not_what_was_stored_is_refused(scene: Scene, fault: str) -> None:
    await drained(scene, STATE)
    (file,) = scene.files
    match fault:
        case "tampered":
            file.write_bytes(b"X" + STATE[1:])
        case "truncated":
            file.write_bytes(STATE[:-1])
        case "longer":
            file.write_bytes(STATE + b"X")
        case "foreign":
            file.write_bytes(b"another")
        case "missing":
            file.unlink()
    with structlog.testing.capture_logs() as logs:
        async with scene.fleet.worker("demo") as (_, engine):
            key = await scene.submitted(engine, 2)
            assert engine.requests[key].checkpoints == (None,)
            record = await scene.finish(engine, 2)
    assert (record.state, record.resumed_steps) == (State.SUCCEEDED, 0)
    assert "checkpoint_not_read" in [line["event"] for line in logs]


async def test_a_later_checkpoint_replaces_the_earlier_one_with_its_file(scene: Scene) -> None:
    async with scene.fleet.worker("demo") as (_, engine):
        key = await scene.submitted(engine)
        await scene.keep(engine, key, b"one")
        await scene.keep(engine, key, STATE)
        await scene.eventually(lambda: len(scene.files) == 1, "the earlier file is gone")
        assert scene.files[0].read_bytes() == STATE
        await scene.finish(engine, 1)


async def test_an_image_without_a_newer_checkpoint_keeps_the_one_it_began_with(
    fleet: StubFleet, make_job: MakeJob, eventually: Eventually
) -> None:
    scene = Scene(fleet, make_job(n=2), eventually)
    await fleet.submit(scene.job)
    await drained(scene, STATE, None)
    async with fleet.worker("demo") as (worker, engine):
        key = await scene.submitted(engine, 2)
        assert engine.requests[key].checkpoints == (STATE, None)
        await scene.keep(engine, key, None, b"second")
        assert await fleet.queue.claims.lose(worker.name, {scene.job.id: 2}, "a fault") == 1
        key = await scene.submitted(engine, 3)
        assert engine.requests[key].checkpoints == (STATE, b"second")
        await scene.finish(engine, 3)


async def test_a_lost_claim_names_no_checkpoint_and_leaves_no_file(scene: Scene) -> None:
    queue, job = scene.fleet.queue, scene.job
    [claim] = await claim_jobs(queue)
    await lose(queue, job.id)
    await queue.maintenance.reclaim()
    [_] = await claim_jobs(queue)
    store = checkpoint_store.CheckpointStore(queue, scene.fleet.storage, "w1")
    claimed = ClaimedJob(claim, ModelSpec(id=job.model, source="none"))
    store.take(claimed, CheckpointTaken(claim.key, (ImageCheckpoint(STATE, len(STATE), 9),)))
    await claimed.wait_for_checkpoint()
    assert await scene.stored() is None
    assert scene.files == []


async def test_a_checkpoint_with_which_two_workers_were_lost_is_dropped(scene: Scene) -> None:
    async with scene.fleet.worker("demo") as (worker, engine):
        await scene.keep(engine, await scene.submitted(engine), STATE)
        given = []
        for epoch in (2, 3):
            lost = {scene.job.id: epoch - 1}
            assert await scene.fleet.queue.claims.lose(worker.name, lost, "a fault") == 1
            key = await scene.submitted(engine, epoch)
            given.append(engine.requests[key].checkpoints)
        assert given == [(STATE,), ()]
        await scene.finish(engine, 3)


@pytest.mark.parametrize("too_much", ["job", "tenant"])
async def test_a_checkpoint_that_is_too_large_is_not_kept(
    scene: Scene, too_much: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if too_much == "job":
        monkeypatch.setattr(checkpoint_store, "MAX_JOB_BYTES", len(STATE) - 1)
    else:
        keys = scene.fleet.queue.client.redis_keys
        await scene.fleet.queue.client.redis.hset(
            keys.tenant_limits, f"{scene.job.tenant}|stored_bytes", len(STATE) - 1
        )
    async with scene.fleet.worker("demo") as (_, engine):
        with structlog.testing.capture_logs() as logs:
            engine.checkpoint(await scene.submitted(engine), STATE)
            await scene.eventually(lambda: "checkpoint_not_stored" in [line["event"] for line in logs], "it is refused")
        assert (await scene.stored(), scene.files) == (None, [])
        assert (await scene.finish(engine, 1)).state is State.SUCCEEDED


@pytest.mark.parametrize("end", ["succeeds", "is canceled", "is deleted"])
async def test_the_files_of_a_job_that_ends_are_swept(scene: Scene, end: str) -> None:
    queue = scene.fleet.queue
    await drained(scene, STATE)
    assert scene.files
    if end == "succeeds":
        async with scene.fleet.worker("demo") as (_, engine):
            await scene.finish(engine, 2)
    else:
        await queue.jobs.cancel(scene.job.id)
    if end == "is deleted":
        assert await queue.jobs.forget(scene.job.id)
    result = await sweep_chunk(queue, scene.fleet.storage)
    assert result.removed >= 1
    assert scene.files == []
    assert (await queue.jobs.get(scene.job.id) is None) == (end == "is deleted")
    footprint = await queue.client.redis.hgetall(queue.client.redis_keys.footprint)
    assert footprint.get("*|stored_objects", "0") == ("1" if end == "succeeds" else "0")


async def test_a_sweep_leaves_the_checkpoint_of_a_queued_job(scene: Scene) -> None:
    await drained(scene, STATE)
    await sweep_chunk(scene.fleet.queue, scene.fleet.storage)
    assert len(scene.files) == 1


async def paused(scene: Scene, engine: StubEngine, epoch: int, *files: bytes | None) -> None:
    """Pause the running job, of which `files` are the state, and wait until it is in no lane."""
    key = await scene.submitted(engine, epoch)
    engine.states[key] = files
    record = await scene.fleet.queue.jobs.pause(scene.job.id)
    assert record is not None
    assert (record.state, record.paused_at_ms is not None) == (State.RUNNING, True)
    await scene.eventually(lambda: _is(scene, State.QUEUED), "its worker has released it")


async def _is(scene: Scene, state: State) -> bool:
    return (await scene.record()).state is state


async def test_a_paused_job_waits_until_it_is_resumed_and_continues_on_another_worker(
    scene: Scene, make_job: MakeJob, eventually: Eventually
) -> None:
    async with scene.fleet.worker("demo") as (_, first):
        await paused(scene, first, 1, STATE)
        other = Scene(scene.fleet, make_job(), eventually)
        await scene.fleet.submit(other.job)
        await other.finish(first, 1)
        assert first.submitted == [f"{scene.job.id}:1", f"{other.job.id}:1"]
    record = await scene.record()
    assert (record.attempts, record.losses, record.worker) == (0, 0, None)
    await scene.fleet.queue.jobs.resume(scene.job.id)
    async with scene.fleet.worker("demo") as (_, second):
        key = await scene.submitted(second, 2)
        assert second.requests[key].checkpoints == (STATE,)
        record = await scene.finish(second, 2)
    assert (record.state, record.attempts, record.resumed_steps) == (State.SUCCEEDED, 1, len(STATE))


async def test_a_job_that_an_older_worker_queued_in_spite_of_its_pause_can_be_paused_again(scene: Scene) -> None:
    """Older scripts keep the mark and do not read it."""
    queue = scene.fleet.queue
    await queue.client.redis.hset(queue.client.redis_keys.job(scene.job.id), "paused", "1700000000000")
    record = await queue.jobs.pause(scene.job.id)
    assert record is not None
    assert record.paused_at_ms == 1_700_000_000_000
    assert await claim_jobs(queue) == []
    await queue.jobs.resume(scene.job.id)
    assert [claim.job.id for claim in await claim_jobs(queue)] == [scene.job.id]


async def test_a_pause_outlives_the_loss_of_its_worker(scene: Scene) -> None:
    queue = scene.fleet.queue
    [_] = await claim_jobs(queue)
    await queue.jobs.pause(scene.job.id)
    await lose(queue, scene.job.id)
    await queue.maintenance.reclaim()
    assert await claim_jobs(queue) == []
    await queue.jobs.resume(scene.job.id)
    [claim] = await claim_jobs(queue)
    assert (claim.job.id, claim.must_run_solo) == (scene.job.id, True)


async def test_a_paused_job_without_checkpoints_begins_anew(scene: Scene) -> None:
    async with scene.fleet.worker("demo") as (_, engine):
        key = await scene.submitted(engine)
        engine.events.on_event(CheckpointTaken(key, (), reason="its pipeline changes its denoiser"))
        await paused(scene, engine, 1, STATE)
        await scene.fleet.queue.jobs.resume(scene.job.id)
        key = await scene.submitted(engine, 2)
        assert engine.requests[key].checkpoints == ()
        assert (await scene.finish(engine, 2)).state is State.SUCCEEDED


async def test_a_job_that_is_canceled_while_it_is_paused_ends_with_its_files(scene: Scene) -> None:
    async with scene.fleet.worker("demo") as (_, engine):
        await paused(scene, engine, 1, STATE)
    assert len(scene.files) == 1
    record = await scene.fleet.queue.jobs.cancel(scene.job.id)
    assert record is not None
    assert (record.state, record.paused_at_ms) == (State.CANCELED, None)
    await sweep_chunk(scene.fleet.queue, scene.fleet.storage)
    assert scene.files == []
