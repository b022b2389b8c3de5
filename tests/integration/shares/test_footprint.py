"""What a tenant keeps in Redis and storage is counted and bounded, and deleting it makes room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.queue import claim, end_retention, put

from shared.auth import Footprint, TenantLimits
from shared.batch import File, Part
from shared.config.adapters import Adapter, UploadedAdapter
from shared.errors import Conflict, QuotaExceeded
from shared.job import InputRef, State, encode
from shared.job_record import Artifact, Outcome
from shared.queue import ExpiredItem, Queue, Submission, SubmitResult, scripts
from shared.runtime.clock import new_id, now_ms
from shared.tasks import Task

Make = Callable[..., Submission]
QueueWith = Callable[..., Queue]


def input_ref(name: str, size: int = 1000, tenant: str = "a") -> InputRef:
    key = f"inputs/{tenant}/in_{name}/1.png"
    return InputRef(id=f"in_{name}", key=key, content_type="image/png", bytes=size, width=64, height=64)


def results(sizes: list[int]) -> Outcome:
    artifacts = [
        Artifact(index=at, key=f"jobs/x/1/{at}.png", content_type="image/png", bytes=size, width=64, height=64, seed=1)
        for at, size in enumerate(sizes)
    ]
    return Outcome(state=State.SUCCEEDED, artifacts=tuple(artifacts), device_seconds=0.1)


def file_of(file_id: str, size: int) -> File:
    at = now_ms()
    fields: dict[str, Any] = {
        "filename": "x.jsonl",
        "purpose": "batch",
        "created_at_ms": at,
        "expires_at_ms": at + 60_000,
    }
    return File(id=file_id, tenant="a", bytes=size, **fields)


async def refused(queue: Queue, submission: Submission) -> str:
    """Submit a job that a quota must refuse; return the quota."""
    (result,) = await queue.jobs.submit([submission])
    assert isinstance(result, QuotaExceeded), result
    return result.quota


async def run(queue: Queue, outcome: Outcome) -> None:
    (one,) = await claim(queue, 1)
    assert await queue.claims.settle("w1", one.job.id, one.epoch, outcome)


async def expired(queue: Queue, item_id: str) -> ExpiredItem:
    """Let the retention of an item pass, and return it as a sweep sees it."""
    redis, keys = queue.client.redis, queue.client.redis_keys
    (row,) = [row for row in await redis.zrange(keys.retention, 0, -1) if item_id in row]
    await redis.zadd(keys.retention, {row: 1})
    (item,) = await queue.maintenance.expired_items()
    return item


async def is_exact(queue: Queue) -> bool:
    """Return whether a recount finds the counters right."""
    return await queue.maintenance.reconcile() == 0


async def test_submitting_and_canceling_in_a_loop_ends(queue_with: QueueWith, make_submission: Make) -> None:
    """Records of canceled jobs count until they are deleted; another tenant is not affected."""
    queue = queue_with(max_kept_jobs_per_tenant=3)
    for _ in range(3):
        (job_id,) = await put(queue, make_submission(tenant="a"))
        await queue.jobs.cancel(job_id)
    assert await refused(queue, make_submission(tenant="a")) == "kept_jobs"
    assert len(await put(queue, make_submission(tenant="b"))) == 1
    assert await queue.jobs.forget(job_id)
    assert len(await put(queue, make_submission(tenant="a"))) == 1
    assert await refused(queue, make_submission(tenant="a")) == "kept_jobs"
    assert await is_exact(queue)


async def test_one_script_accepts_jobs_up_to_the_quota(queue_with: QueueWith, make_submission: Make) -> None:
    """The jobs of one call count one after the other; a repetition of accepted ones is accepted."""
    queue = queue_with(max_kept_jobs_per_tenant=2)
    jobs = [make_submission(tenant="a") for _ in range(3)]
    for _ in range(2):
        results = await queue.jobs.submit(jobs)
        assert [isinstance(one, SubmitResult) for one in results] == [True, True, False]
    assert (await queue.api_keys.footprint("a")).kept_jobs == 2


async def test_large_records_reach_a_quota_of_their_own(queue_with: QueueWith, make_submission: Make) -> None:
    """The bytes of a job are estimated from its text."""
    queue = queue_with(max_record_bytes_per_tenant=50_000)
    for _ in range(2):
        await put(queue, make_submission(tenant="a", prompt="x" * 20_000))
    assert await refused(queue, make_submission(tenant="a", prompt="x" * 20_000)) == "record_bytes"
    assert len(await put(queue, make_submission(tenant="a"))) == 1


async def test_a_job_of_a_group_counts_with_its_rows_there(queue_with: QueueWith, make_submission: Make) -> None:
    """350 bytes more than a job whose text is as long, until it is deleted."""
    queue = queue_with()
    grouped = make_submission(tenant="a", group="nightly", prompt="")
    filler = "x" * (len(encode(grouped.job)) - len(encode(make_submission(tenant="b", prompt="").job)))
    (job_id, _) = await put(queue, grouped, make_submission(tenant="b", prompt=filler))
    for ends in (False, True):
        for _ in range(2 if ends else 0):
            await run(queue, results([2_000]))
        in_group, alone = [(await queue.api_keys.footprint(tenant)).record_bytes for tenant in ("a", "b")]
        assert in_group - alone == 350
    assert await is_exact(queue)
    assert await queue.jobs.forget(job_id)
    assert await queue.api_keys.footprint("a") == Footprint()


async def test_a_job_counts_with_its_row_among_the_children_of_each_parent(
    queue_with: QueueWith, make_submission: Make
) -> None:
    """200 bytes each, beside its text: before and after its end, until it is deleted."""
    queue = queue_with()
    parents = await put(queue, make_submission(tenant="a"), make_submission(tenant="a"))
    before = (await queue.api_keys.footprint("a")).record_bytes
    child = make_submission(tenant="a", after=tuple(parents), prompt='a "job_1"')
    alone = make_submission(tenant="b", prompt='a "job_1"')
    await put(queue, child, alone)
    text = len(encode(child.job)) - len(encode(alone.job))
    more = [(await queue.api_keys.footprint("a")).record_bytes - before]
    for job_id in (*parents, child.job.id):
        await queue.jobs.cancel(job_id)
    for parent in parents:
        assert await queue.jobs.forget(parent)
    more.append((await queue.api_keys.footprint("a")).record_bytes)
    assert [one - (await queue.api_keys.footprint("b")).record_bytes for one in more] == [400 + text] * 2
    assert await is_exact(queue)
    assert await queue.jobs.forget(child.job.id)
    assert await queue.api_keys.footprint("a") == Footprint()


async def test_results_count_and_running_work_ends(queue_with: QueueWith, make_submission: Make) -> None:
    """Above the quota of storage no job is accepted; those that run store what they make."""
    queue = queue_with(max_stored_bytes_per_tenant=5_000, max_stored_objects_per_tenant=100)
    first, second = await put(queue, make_submission(tenant="a"), make_submission(tenant="a"))
    await run(queue, results([2_000, 2_500]))
    assert len(await put(queue, make_submission(tenant="a"))) == 1
    await run(queue, results([2_000]))
    kept = await queue.api_keys.footprint("a")
    assert (kept.kept_jobs, kept.stored_objects, kept.stored_bytes) == (3, 3, 6_500)
    assert await refused(queue, make_submission(tenant="a")) == "stored_bytes"
    with pytest.raises(QuotaExceeded, match="stored_bytes"):
        await queue.inputs.put("a", input_ref("x"), 60)
    await end_retention(queue, first)
    assert (await queue.api_keys.footprint("a")).stored_bytes == 2_000
    assert len(await put(queue, make_submission(tenant="a"))) == 1
    assert await is_exact(queue)
    assert await queue.jobs.forget(second)
    assert await is_exact(queue)


def adapter_of(adapter_id: str) -> UploadedAdapter:
    fields: dict[str, Any] = {"model": "demo", "name": "x", "bytes": 4_000, "parts": 2, "sha256": ""}
    return UploadedAdapter(id=adapter_id, created_at_ms=1, **fields)


async def test_adapters_count_until_their_objects_are_deleted(queue_with: QueueWith, make_submission: Make) -> None:
    """Uploads count from their beginning; one that is given up makes room when its time is over."""
    queue = queue_with(max_stored_bytes_per_tenant=10_000, max_adapters_per_tenant=3)
    kept, given_up = new_id("adapter"), new_id("adapter")
    for adapter_id in (kept, given_up):
        await queue.adapters.begin("a", adapter_id, 4_000, 2)
    with pytest.raises(QuotaExceeded, match="stored_bytes"):
        await queue.adapters.begin("a", new_id("adapter"), 4_000, 2)
    await queue.adapters.put("a", adapter_of(kept))
    assert (await queue.api_keys.footprint("a")).stored_objects == 4
    assert await is_exact(queue)
    item = await expired(queue, given_up)
    assert item.prefix == f"adapters/a/{given_up}/"
    for _ in range(2):  # while its parts are being deleted, and when they are
        with pytest.raises(Conflict, match="given up"):
            await queue.adapters.put("a", adapter_of(given_up))
        await queue.maintenance.forget_item(item)
    assert (await queue.adapters.page("a", None, 10, newest_first=True))[0] == [adapter_of(kept)]
    await queue.maintenance.forget_item(await queue.adapters.forget("a", kept))
    assert await queue.api_keys.footprint("a") == Footprint()
    assert await is_exact(queue)


async def test_a_repeated_upload_counts_once_while_the_parts_of_the_first_are_kept(queue_with: QueueWith) -> None:
    queue, adapter_id = queue_with(), new_id("adapter")
    for _ in range(3):
        await queue.adapters.begin("a", adapter_id, 4_000, 2)
        await queue.adapters.abandon("a", adapter_id)
    assert (await queue.api_keys.footprint("a")).stored_bytes == 4_000
    assert await is_exact(queue)
    (item,) = await queue.maintenance.expired_items()
    await queue.maintenance.forget_item(item)
    assert await queue.api_keys.footprint("a") == Footprint()


async def test_an_upload_of_a_file_that_took_too_long_is_refused(queue_with: QueueWith) -> None:
    """Its parts are in deletion, or deleted."""
    queue = queue_with()
    await queue.files.begin("a", "file_1", 600)
    item = await expired(queue, "file_1")
    for _ in range(2):
        with pytest.raises(Conflict, match="took too long"):
            await queue.files.put(file_of("file_1", 600), [Part("0", 600)])
        await queue.maintenance.forget_item(item)
    assert await queue.api_keys.footprint("a") == Footprint()


async def test_adapters_are_limited_by_tenant_and_in_all(queue_with: QueueWith) -> None:
    queue = queue_with(max_adapters_per_tenant=2, max_adapters=3)
    for tenant in ("a", "a", "b"):
        await queue.adapters.begin(tenant, new_id("adapter"), 1, 1)
    with pytest.raises(Conflict, match="a tenant has at most 2"):
        await queue.adapters.begin("a", new_id("adapter"), 1, 1)
    with pytest.raises(Conflict, match="the maximum of 3"):
        await queue.adapters.begin("b", new_id("adapter"), 1, 1)


async def test_an_adapter_is_held_by_the_jobs_that_use_it(queue_with: QueueWith, make_submission: Make) -> None:
    """It can be deleted when the last of them has ended, in whatever way."""
    queue = queue_with()
    adapter = adapter_of(new_id("adapter"))
    await queue.adapters.begin("a", adapter.id, 4_000, 2)
    await queue.adapters.put("a", adapter)
    jobs = [make_submission(tenant="a", adapters=(Adapter(id=adapter.id),)) for _ in range(2)]
    await put(queue, *jobs)
    await run(queue, results([1]))
    with pytest.raises(Conflict, match="used by a job"):
        await queue.adapters.forget("a", adapter.id)
    await queue.jobs.cancel(jobs[1].job.id)
    await queue.jobs.cancel(jobs[0].job.id)
    assert (await queue.adapters.forget("a", adapter.id)).id == adapter.id


async def test_inputs_count_once_each(queue_with: QueueWith, make_submission: Make) -> None:
    """Equal images are one object; an input that expires makes room."""
    queue = queue_with(max_stored_objects_per_tenant=2)
    ref = input_ref("1")
    for name in ("1", "2", "1"):
        await queue.inputs.put("a", input_ref(name), 60)
    with pytest.raises(QuotaExceeded, match="stored_objects") as error:
        await queue.inputs.put("a", input_ref("3"), 60)
    assert error.value.retry_after_s > 0
    assert (await queue.api_keys.footprint("a")).stored_bytes == 2_000
    await queue.inputs.put("b", input_ref("3", tenant="b"), 60)
    await queue.api_keys.set_limits("a", TenantLimits(stored_objects=3))
    (job_id,) = await put(queue, make_submission(tenant="a", images=(ref,), task=Task.IMAGE_TO_IMAGE))
    await queue.jobs.cancel(job_id)
    await end_retention(queue, job_id, "in_1", "in_2", "in_3")
    assert await queue.api_keys.footprints() == {}
    assert await is_exact(queue)


async def test_an_upload_counts_before_it_is_stored(queue_with: QueueWith) -> None:
    """Uploads in progress are within the quota together; a deleted or unfinished one makes room."""
    queue = queue_with(max_stored_bytes_per_tenant=1_000)
    await queue.files.begin("a", "file_1", 600)
    with pytest.raises(QuotaExceeded, match="stored_bytes"):
        await queue.files.begin("a", "file_2", 600)
    await queue.files.put(file_of("file_1", 600), [Part("0", 400), Part("1", 200)])
    kept = await queue.api_keys.footprint("a")
    assert (kept.stored_objects, kept.stored_bytes) == (2, 600)
    assert await is_exact(queue)
    await queue.files.forget("a", "file_1")
    await queue.files.begin("a", "file_2", 600)
    await end_retention(queue, "file_1", "file_2")
    assert await queue.api_keys.footprint("a") == Footprint()
    assert await is_exact(queue)


async def test_idempotency_keys_of_deleted_jobs_are_bounded(
    queue_with: QueueWith, make_submission: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key outlives its job: the new ones within its lifetime are counted."""
    monkeypatch.setattr(scripts, "IDEMPOTENCY_KEYS", 2)
    queue = queue_with(max_kept_jobs_per_tenant=2)
    for number in range(2):
        submission = make_submission(tenant="a", idempotency_key=f"k{number}", fingerprint="x")
        (job_id,) = await put(queue, submission)
        await queue.jobs.cancel(job_id)
        assert await queue.jobs.forget(job_id)
    assert (
        await refused(queue, make_submission(tenant="a", idempotency_key="k2", fingerprint="x")) == "idempotency_keys"
    )
    assert len(await put(queue, make_submission(tenant="a"))) == 1
    (again,) = await queue.jobs.submit([make_submission(tenant="a", idempotency_key="k1", fingerprint="x")])
    assert isinstance(again, SubmitResult)
    assert again.replayed


async def test_a_tenants_own_limit_replaces_the_settings(queue_with: QueueWith, make_submission: Make) -> None:
    queue = queue_with(max_kept_jobs_per_tenant=1)
    await queue.api_keys.set_limits("a", TenantLimits(kept_jobs=2))
    await put(queue, make_submission(tenant="a"), make_submission(tenant="a"))
    assert await refused(queue, make_submission(tenant="a")) == "kept_jobs"


async def test_wrong_counters_are_repaired(queue: Queue, make_submission: Make) -> None:
    """As after a failover, for jobs in every state, inputs, files, and tenants that keep nothing."""
    await put(queue, *[make_submission(tenant="a") for _ in range(3)])
    await run(queue, results([500]))
    await claim(queue, 1)
    await queue.inputs.put("a", input_ref("1"), 60)
    await queue.files.begin("a", "file_1", 600)
    right = await queue.api_keys.footprints()
    assert await is_exact(queue)
    name = queue.client.redis_keys.footprint
    await queue.client.redis.hset(name, mapping={"a|kept_jobs": 9, "a|stored_bytes": 1, "gone|stored_objects": 4})
    assert await queue.maintenance.reconcile() >= 3
    assert await queue.api_keys.footprints() == right
    await queue.client.redis.delete(name)
    assert await queue.maintenance.reconcile() >= 4
    assert await queue.api_keys.footprints() == right


async def test_a_size_is_close_to_what_redis_uses(queue: Queue, make_submission: Make) -> None:
    """The estimate of a queued job is within a factor of two."""
    redis = queue.client.redis
    await put(queue, *[make_submission(tenant="a") for _ in range(100)])
    before, kept = int((await redis.info("memory"))["used_memory"]), await queue.api_keys.footprint("a")
    for _ in range(4):
        await put(queue, *[make_submission(tenant="a") for _ in range(500)])
    used = int((await redis.info("memory"))["used_memory"]) - before
    counted = (await queue.api_keys.footprint("a")).record_bytes - kept.record_bytes
    assert 0.5 < counted / used < 2, f"{counted / 2000:.0f} bytes a job are counted, {used / 2000:.0f} used"
