"""One claimed job from its claim to its end, with the test in place of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from harness.queue import end, lose, put

from shared.artifact_ref import ArtifactRef
from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.errors import ModelUnavailable, StorageRefused, StorageUnavailable, without_places
from shared.job import InputRef, State
from shared.job_fields import OnDeadline
from shared.job_record import FieldWarning
from shared.queue import Claim, Queue, Submission
from shared.queue.maintenance.tenant_usage import UsageQuery
from shared.runtime.asyncio_tools import MAX_FAULTS, retry_while_unavailable
from shared.storage.folder import FolderStorage
from worker import job_runner
from worker.adapter_folder import AdapterFolder
from worker.claims.checkpoint_store import CheckpointStore
from worker.claims.claimed_job import ClaimedJob, StopReason
from worker.engine.engine_status import EngineStatus
from worker.engine.outputs import Output
from worker.engine.protocol import EngineRequest, JobFinished
from worker.job_runner import JobRunner
from worker.model_availability import ModelAvailability
from worker.output.sending import OutputSender
from worker.output.upload import Uploader

WORKER = "w1"
WARNINGS = (FieldWarning(param="mask", message="mask: repaints nothing"),)


class EngineStub:
    """Records requests; the test produces their outputs."""

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []

    def submit(self, request: EngineRequest) -> None:
        self.requests.append(request)

    def cancel(self, claim_key: str) -> None: ...

    def status(self) -> EngineStatus:
        return EngineStatus("cpu")


class SlowFolder(FolderStorage):
    """Storage whose writes wait for `open`, and continue when their caller is canceled."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, timeout_s=10)
        self.put_called, self.open = asyncio.Event(), asyncio.Event()

    async def put(self, key: str, data: bytes, content_type: str) -> None:
        self.put_called.set()
        writing = asyncio.ensure_future(self._put_later(key, data, content_type))
        await asyncio.shield(writing)

    async def _put_later(self, key: str, data: bytes, content_type: str) -> None:
        await self.open.wait()
        await super().put(key, data, content_type)


@dataclass
class RunnerHarness:
    queue: Queue
    storage: SlowFolder
    uploader: Uploader
    root: Path
    engine: EngineStub

    async def claim(self, worker: str = WORKER) -> Claim:
        (claim,) = await self.queue.claims.claim(worker, ["demo"], 8)
        return claim

    def run(self, claim: Claim) -> tuple[ClaimedJob, asyncio.Task[None]]:
        claimed = ClaimedJob(claim, ModelSpec(id="demo", source="none"))
        availability = ModelAvailability(self.queue, self.engine, WORKER, ["demo"])  # type: ignore[arg-type]
        adapters = AdapterFolder(self.queue, self.storage, 1)
        checkpoints = CheckpointStore(self.queue, self.storage, WORKER)
        runner = JobRunner(self.queue, self.storage, adapters, self.engine, availability, checkpoints)  # type: ignore[arg-type]
        return claimed, asyncio.create_task(runner.run(claimed))

    async def finish(self, claimed: ClaimedJob, running: asyncio.Task[None]) -> None:
        claimed.upload(self.uploader, 0, Output(np.zeros((64, 64, 3), np.uint8)))
        claimed.engine_done.set_result(JobFinished(claimed.claim_key))
        async with asyncio.timeout(10):
            await running

    def stored(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)) for path in (self.root / "jobs").rglob("*.*"))


@pytest.fixture
async def harness(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[RunnerHarness]:
    storage = SlowFolder(tmp_path)
    storage.open.set()
    uploader = Uploader(storage, 10**8, OutputSender(fake_queue, Settings()))
    yield RunnerHarness(fake_queue, storage, uploader, tmp_path, EngineStub())
    uploader.close()
    await storage.close()


async def test_settled_job_keeps_its_artifacts(harness: RunnerHarness, make_submission: Any) -> None:
    (job_id,) = await put(harness.queue, make_submission())
    await harness.finish(*harness.run(await harness.claim()))
    record = await harness.queue.jobs.get(job_id)
    assert record is not None
    assert (record.state, [artifact.key for artifact in record.artifacts]) == (State.SUCCEEDED, harness.stored())


async def test_a_renewal_beside_the_end_of_a_job_does_not_change_how_it_ended(
    harness: RunnerHarness, make_submission: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that the claim is lost, as the job is settled: its trace shows the job's state."""
    ended: list[str] = []

    class Spans(job_runner.JobSpans):
        def record(self) -> None:
            ended.append(self.ended_as)

    monkeypatch.setattr(job_runner, "JobSpans", Spans)
    await put(harness.queue, make_submission())
    claimed, running = harness.run(await harness.claim())
    settle = harness.queue.claims.settle

    async def settle_beside_a_renewal(*args: Any, **named: Any) -> bool:
        settled = await settle(*args, **named)
        claimed.stop(StopReason.LOST)
        return settled

    monkeypatch.setattr(harness.queue.claims, "settle", settle_beside_a_renewal)
    await harness.finish(claimed, running)
    assert ended == [State.SUCCEEDED]


@pytest.mark.parametrize("choice", OnDeadline)
async def test_a_job_stops_at_its_deadline_unless_it_runs_on(
    harness: RunnerHarness, make_submission: Any, choice: OnDeadline
) -> None:
    """The engine orders both by their latest start."""
    await put(harness.queue, make_submission(time_limit_ms=3_600_000, on_deadline=choice))
    before = time.monotonic()
    claimed, running = harness.run(await harness.claim())
    assert (claimed.deadline_at_s is None) == (choice is OnDeadline.RUN)
    await harness.finish(claimed, running)
    (request,) = harness.engine.requests
    assert request.start_by_s == pytest.approx(before + 3600, abs=60)


@pytest.mark.parametrize("deleted", [False, True])
async def test_uploads_of_a_lost_claim_are_removed(harness: RunnerHarness, make_submission: Any, deleted: bool) -> None:
    """A frozen worker continues after its job ran elsewhere, and possibly was deleted: retention runs no more."""
    (job_id,) = await put(harness.queue, make_submission())
    claimed, running = harness.run(await harness.claim())
    await lose(harness.queue, job_id)
    assert await harness.queue.maintenance.reclaim() == [job_id]
    other = await harness.claim("w2")
    await harness.storage.put(f"jobs/{job_id}/{other.epoch}/0.png", b"image", "image/png")
    assert await end(harness.queue, other, "w2")
    if deleted:
        await harness.storage.delete_prefix(f"jobs/{job_id}/")
        assert await harness.queue.jobs.forget(job_id)
    await harness.finish(claimed, running)
    assert harness.stored() == ([] if deleted else [f"jobs/{job_id}/{other.epoch}/0.png"])


async def test_upload_in_progress_when_the_claim_is_lost_is_removed(
    harness: RunnerHarness, make_submission: Any
) -> None:
    """It cannot be interrupted: the runner waits for it."""
    (job_id,) = await put(harness.queue, make_submission())
    claimed, running = harness.run(await harness.claim())
    harness.storage.open.clear()
    finishing = asyncio.create_task(harness.finish(claimed, running))
    await harness.storage.put_called.wait()
    await lose(harness.queue, job_id)
    await harness.queue.maintenance.reclaim()
    await harness.claim("w2")
    claimed.stop(StopReason.LOST)
    await asyncio.sleep(0.05)
    harness.storage.open.set()
    await finishing
    assert harness.stored() == []


async def test_released_job_is_not_settled(harness: RunnerHarness, make_submission: Any) -> None:
    """Its uploads stay until retention removes them: a drain has no time for it."""
    (job_id,) = await put(harness.queue, make_submission())
    claim = await harness.claim()
    claimed, running = harness.run(claim)
    claimed.stop(StopReason.RELEASED)
    await harness.queue.claims.release(WORKER, {job_id: claim.epoch})
    await harness.finish(claimed, running)
    record = await harness.queue.jobs.get(job_id)
    assert record is not None
    assert record.state is State.QUEUED


async def test_a_job_that_the_engine_ended_for_an_earlier_run_runs_again(
    harness: RunnerHarness, make_submission: Any
) -> None:
    """A failover can give out an epoch twice; a job without its image has not succeeded."""
    await put(harness.queue, make_submission())
    claimed, running = harness.run(await harness.claim())
    claimed.engine_done.set_result(JobFinished(claimed.claim_key, canceled=True))
    async with asyncio.timeout(10):
        await running
    assert (await harness.claim("w2")).epoch == claimed.claim.epoch + 1


async def test_job_is_canceled_while_its_input_cannot_be_read(
    harness: RunnerHarness, make_submission: Callable[..., Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage outage can be long; a cancellation does not wait for its end."""
    reads = 0

    async def unavailable(key: str, start: int = 0, end: int | None = None) -> bytes:
        nonlocal reads
        reads += 1
        raise StorageUnavailable("outage")

    monkeypatch.setattr(harness.storage, "read", unavailable)
    image = InputRef(id="in_1", key="inputs/a/b", content_type="image/png", bytes=1, width=64, height=64)
    await harness.queue.inputs.put("default", image, 100)
    (job_id,) = await put(harness.queue, make_submission(images=(image,)))
    claimed, running = harness.run(await harness.claim())
    async with asyncio.timeout(10):
        while not reads:
            await asyncio.sleep(0.01)
        claimed.stop(StopReason.CANCELED)
        await running
    record = await harness.queue.jobs.get(job_id)
    assert record is not None
    assert record.state is State.CANCELED
    assert harness.engine.requests == []


async def test_an_input_that_storage_refuses_for_good_fails_its_job(
    harness: RunnerHarness, make_submission: Callable[..., Submission], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged one, for example: the job does not hold its slot for ever."""
    reads = 0

    async def refuse(key: str, start: int = 0, end: int | None = None) -> bytes:
        nonlocal reads
        reads += 1
        raise StorageRefused("bucket 'private' returned it", public="storage: returned a damaged object")

    monkeypatch.setattr(harness.storage, "read", refuse)
    monkeypatch.setattr(job_runner, "retry_while_unavailable", partial(retry_while_unavailable, max_s=0.001))
    image = InputRef(id="in_1", key="inputs/a/b", content_type="image/png", bytes=1, width=64, height=64)
    await harness.queue.inputs.put("default", image, 100)
    (job_id,) = await put(harness.queue, make_submission(images=(image,)))
    _, running = harness.run(await harness.claim())
    async with asyncio.timeout(30):
        await running
    record = await harness.queue.jobs.get(job_id)
    assert record is not None
    assert record.error is not None
    assert (record.error.code, record.error.param, reads) == ("input_missing", "image", MAX_FAULTS)
    assert record.error.message == "the input image cannot be read: storage: returned a damaged object"


async def test_a_job_reads_what_another_one_has_made_since_it_was_submitted(
    harness: RunnerHarness, make_submission: Any
) -> None:
    def made_by(job_id: str, index: int) -> InputRef:
        source = ArtifactRef(job=job_id, artifact=index)
        return InputRef(id="", key="", content_type="image/png", bytes=0, width=64, height=64, source=source)

    (source,) = await put(harness.queue, make_submission())
    child, without = [
        (await put(harness.queue, make_submission(images=(made_by(source, index),))))[0] for index in (0, 1)
    ]
    await harness.finish(*harness.run(await harness.claim()))
    (stored,) = harness.stored()
    claims = {claim.job.id: claim for claim in await harness.queue.claims.claim(WORKER, ["demo"], 8)}
    _, failing = harness.run(claims[without])
    claimed, running = harness.run(claims[child])
    async with asyncio.timeout(10):
        while len(harness.engine.requests) < 2:
            await asyncio.sleep(0.01)
        await failing
    assert harness.engine.requests[-1].inputs.images == ((harness.root / stored).read_bytes(),)
    await harness.finish(claimed, running)
    record = await harness.queue.jobs.get(without)
    assert record is not None
    assert record.error is not None
    assert (record.error.code, record.error.param) == ("input_missing", "image")
    assert record.error.message.startswith(f"artifact 1 of job {source}")


async def test_inputs_reach_the_engine_in_order_and_a_missing_one_fails_the_job(
    harness: RunnerHarness, make_submission: Any
) -> None:
    names = ("first", "second", "mask", "last")
    refs = {
        name: InputRef(
            id=f"in_{name}", key=f"inputs/{name}.png", content_type="image/png", bytes=len(name), width=1, height=1
        )
        for name in names
    }
    for name in names:
        await harness.storage.put(refs[name].key, name.encode(), "image/png")
        await harness.queue.inputs.put("default", refs[name], 100)
    inputs = {"images": (refs["second"], refs["first"]), "mask": refs["mask"], "last_image": refs["last"]}
    await put(harness.queue, make_submission(**inputs))
    claimed, running = harness.run(await harness.claim())
    async with asyncio.timeout(10):
        while not harness.engine.requests:
            await asyncio.sleep(0.01)
    (request,) = harness.engine.requests
    files = request.inputs
    assert (files.images, files.mask, files.last_image) == ((b"second", b"first"), b"mask", b"last")
    await harness.finish(claimed, running)

    for missing, param in (("first", "images.1"), ("mask", "mask"), ("last", "last_image")):
        await harness.storage.delete_prefix(refs[missing].key)
        (job_id,) = await put(harness.queue, make_submission(**inputs))
        _, running = harness.run(await harness.claim())
        async with asyncio.timeout(10):
            await running
        record = await harness.queue.jobs.get(job_id)
        assert record is not None
        assert record.error is not None
        assert (record.error.code, record.error.param) == ("input_missing", param)
        await harness.storage.put(refs[missing].key, missing.encode(), "image/png")


async def test_the_error_that_a_client_reads_names_no_folder(
    harness: RunnerHarness, make_submission: Callable[..., Submission]
) -> None:
    (job_id,) = await put(harness.queue, make_submission())
    claimed, running = harness.run(await harness.claim())
    error = ModelUnavailable(
        "model 'demo' cannot be loaded from /srv/models/demo: no file /srv/models/demo/unet/a.json"
    )
    claimed.engine_done.set_result(JobFinished(claimed.claim_key, error=error))
    async with asyncio.timeout(10):
        await running
    record = await harness.queue.jobs.get(job_id)
    assert record is not None
    assert record.error is not None
    assert record.error.message == "model 'demo' cannot be loaded from demo: no file a.json"


TEXTS = [
    ("no file /srv/models/sdxl/unet/config.json", "no file config.json"),
    ("[Errno 2] No such file: '/home/ann/data/storage/jobs/a/0.png'", "[Errno 2] No such file: '0.png'"),
    ("~/.cache/huggingface/token is missing", "token is missing"),
    ("GET https://user:pass@hub.internal:8443/a?token=b failed", "GET [url] failed"),
    ("connect to 10.0.0.7:6379 failed", "connect to [address] failed"),
    ("model 'a/b' holds unet/config.json and 1/2 of 3.4.5", "model 'a/b' holds unet/config.json and 1/2 of 3.4.5"),
    ("the shapes (2, 4) and 64x64 differ", "the shapes (2, 4) and 64x64 differ"),
]


@pytest.mark.parametrize(("text", "public"), TEXTS)
def test_the_error_of_a_job_names_no_folder_or_address(text: str, public: str) -> None:
    assert without_places(text) == public


async def test_the_log_and_the_record_of_a_job_have_what_its_engine_reports(
    harness: RunnerHarness, make_submission: Callable[..., Submission]
) -> None:
    """What a tenant has cost is the sum of its lines; a metric labelled by tenants would be unbounded."""
    (job_id,) = await put(harness.queue, make_submission(tenant="acme"))
    claimed, running = harness.run(await harness.claim())
    harness.storage.open.set()
    claimed.upload(harness.uploader, 0, Output(np.zeros((64, 64, 3), np.uint8)))
    with structlog.testing.capture_logs() as logs:
        finished = JobFinished(claimed.claim_key, device_seconds=1.25, warnings=WARNINGS)
        claimed.engine_done.set_result(finished)
        async with asyncio.timeout(60):
            await running
    (line,) = [line for line in logs if line["event"] == "job"]
    assert (line["tenant"], line["device_seconds"], line["state"]) == ("acme", 1.25, "succeeded")
    record = await harness.queue.jobs.get(job_id)
    assert record is not None
    assert (record.device_seconds, record.warnings) == (1.25, WARNINGS)


async def device_seconds(queue: Queue) -> dict[str, float]:
    """Return the device seconds of each tenant today."""
    today = await queue.usage.today()
    rows, _ = await queue.usage.page(UsageQuery(today, today, groups=frozenset({"tenant"})), None, 100)
    return {row.tenant or "": row.sum.device_seconds for row in rows}


@pytest.mark.parametrize("reason", [StopReason.LOST, StopReason.RELEASED])
async def test_a_run_without_its_claim_counts_for_its_tenant(
    harness: RunnerHarness,
    make_submission: Callable[..., Submission],
    eventually: Callable[..., Awaitable[None]],
    reason: StopReason,
) -> None:
    """The device has worked, and the job will use it again."""
    await put(harness.queue, make_submission(tenant="acme"))
    claimed, running = harness.run(await harness.claim())
    await eventually(lambda: bool(harness.engine.requests), "the engine has the job")
    claimed.stop(reason)
    claimed.engine_done.set_result(JobFinished(claimed.claim_key, canceled=True, device_seconds=1.25))
    async with asyncio.timeout(60):
        await running
    assert await device_seconds(harness.queue) == {"acme": 1.25}


async def test_a_run_that_lost_its_claim_before_it_settled_counts_once(
    harness: RunnerHarness, make_submission: Callable[..., Submission]
) -> None:
    """The script refuses its result, and the job's next run counts as well."""
    (job_id,) = await put(harness.queue, make_submission(tenant="acme"))
    claimed, running = harness.run(await harness.claim())
    await lose(harness.queue, job_id)
    await harness.queue.maintenance.reclaim()
    again = await harness.claim("w2")
    claimed.engine_done.set_result(JobFinished(claimed.claim_key, device_seconds=1.25))
    async with asyncio.timeout(60):
        await running
    assert await end(harness.queue, again, "w2", device_seconds=0.5)
    assert await device_seconds(harness.queue) == {"acme": 1.75}
