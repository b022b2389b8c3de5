"""A worker whose models file changes while it runs jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from harness.stub_engine import StubEngine, StubFleet

from shared.config import models_watch
from shared.job import Job
from shared.queue import Queue, WorkerInfo

Eventually = Callable[..., Awaitable[None]]
MakeJob = Callable[..., Job]
LIMITS = "[model.limits]\nmultiple_of = 8\n"


def entry(model: str, keys: str = "") -> str:
    return f'[[model]]\nid = "{model}"\nsource = "org/{model}"\n{keys}{LIMITS}'


class RunningWorker:
    """A worker of the model `one` that follows its file, and what it does."""

    def __init__(self, fleet: StubFleet, file: Path, eventually: Eventually) -> None:
        self.fleet = fleet
        self.file = file
        self.eventually = eventually
        self.worker, self.engine, self.running = fleet.start("one", "two", file=file)

    def write(self, *entries: str) -> None:
        self.file.write_text("".join(entries), "utf-8")

    async def submit(self, job: Job) -> None:
        await self.fleet.submit(job)

    async def claimed(self, job: Job) -> str:
        """Wait until a job is in the engine, and return its claim key."""
        await self.eventually(lambda: self._key(job) is not None, "the job is claimed")
        return self._key(job) or ""

    def _key(self, job: Job) -> str | None:
        engine: StubEngine = self.engine
        return next((key for key, request in engine.requests.items() if request.job.id == job.id), None)

    async def info(self) -> WorkerInfo:
        (info,) = await self.fleet.queue.workers.all()
        return info

    async def replaced(self, *changed: str) -> None:
        """Wait for the next change of the engine's models."""
        await self.eventually(lambda: bool(self.engine.replaced), "the models are replaced")
        assert self.engine.replaced.pop(0) == set(changed)


@pytest.fixture
async def worker(
    queue: Queue, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningWorker]:
    monkeypatch.setattr(models_watch, "POLL_S", 0.02)
    fleet, file = StubFleet(queue, tmp_path), tmp_path / "models.toml"
    file.write_text(entry("one"), "utf-8")
    worker = RunningWorker(fleet, file, eventually)
    yield worker
    worker.engine.release_all()
    worker.worker.drain()
    await worker.running
    await fleet.close()


async def test_a_changed_model_waits_for_its_running_jobs(worker: RunningWorker, make_job: MakeJob) -> None:
    """Jobs that are queued meanwhile run with the new entry, and are not claimed before."""
    first, second = make_job(model="one"), make_job(model="one")
    await worker.submit(first)
    key = await worker.claimed(first)
    worker.write(entry("one", 'revision = "new"\n'), entry("two"))
    await worker.eventually(lambda: worker.worker._availability.retiring == {"one"}, "the change waits")
    await worker.submit(second)
    await asyncio.sleep(0.3)  # in which a worker with free slots claims
    assert worker.engine.replaced == []
    assert worker.engine.submitted == [key]
    worker.engine.finish(key)
    await worker.replaced("one", "two")
    assert worker.engine.requests[await worker.claimed(second)].spec.revision == "new"
    assert (await worker.info()).models == ("one", "two")


async def test_a_change_of_defaults_waits_for_no_job(worker: RunningWorker, make_job: MakeJob) -> None:
    first, second = make_job(model="one"), make_job(model="one")
    await worker.submit(first)
    await worker.claimed(first)
    worker.write(entry("one", "checkpoint_s = 5.0\n"))
    await worker.replaced()
    await worker.submit(second)
    assert worker.engine.requests[await worker.claimed(second)].spec.checkpoint_s == 5.0
    assert len(worker.engine.requests) == 2


async def test_jobs_of_a_removed_model_wait_until_a_worker_serves_it(worker: RunningWorker, make_job: MakeJob) -> None:
    job, other = make_job(model="one"), make_job(model="two")
    worker.write(entry("two"))
    await worker.replaced("one", "two")
    await worker.submit(job)
    await worker.submit(other)
    await worker.claimed(other)
    assert (await worker.info()).models == ("two",)
    assert len(worker.engine.submitted) == 1
    worker.write(entry("one"), entry("two"))
    await worker.replaced("one")
    worker.engine.finish(await worker.claimed(other))
    await worker.claimed(job)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (entry("one", "max_bach = 3\n"), "model 'one': max_bach: unknown key"),
        (entry("one", "devices = 2\n"), "a model has devices = 2, and this worker was started for 1; restart it"),
    ],
)
async def test_a_change_that_cannot_be_applied_is_in_the_record_of_the_worker(
    worker: RunningWorker, make_job: MakeJob, text: str, fault: str
) -> None:
    """The models before it are served."""

    async def fault_is(part: str) -> bool:
        return any(part in (one.models_fault or "none") for one in await worker.fleet.queue.workers.all())

    worker.write(text)
    await worker.eventually(lambda: fault_is(fault), "the fault is shown")
    job = make_job(model="one")
    await worker.submit(job)
    worker.engine.finish(await worker.claimed(job))
    worker.write(entry("one"))
    await worker.eventually(lambda: fault_is("none"), "it is mended")
    assert worker.engine.replaced == []


async def test_a_model_for_packages_that_the_engine_was_started_without_restarts_the_worker(
    worker: RunningWorker, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drains: the supervisor starts a process that reads the new file."""
    monkeypatch.setattr(worker.worker._models_reload, "_hidden", frozenset({"torchao"}))
    job = make_job(model="one")
    await worker.submit(job)
    key = await worker.claimed(job)
    worker.write(entry("one"), entry("two"))
    await worker.eventually(lambda: worker.worker._claim_loop._stopped, "it drains")
    worker.engine.finish(key)
    assert await worker.running == 0
