"""Submitting jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from harness.queue import claim, claim_ids, end, end_retention, names_left, put, state_of

from shared.auth import TenantLimits
from shared.config.adapters import Adapter, UploadedAdapter
from shared.errors import IdempotencyMismatch, InvalidRequest, QueueFull
from shared.job import InputRef, Job, State
from shared.job_fields import Priority
from shared.queue import Queue, Submission, SubmitResult
from shared.runtime.clock import new_id

Make = Callable[..., Submission]


async def test_a_record_has_the_submitted_job(queue: Queue, make_submission: Make) -> None:
    """Readers get what the API resolved."""
    one = make_submission(prompt="größer \u2764 'quoted' \"twice\"", metadata={"k": "v"}, seed=2**62)
    assert await queue.jobs.submit([one]) == [SubmitResult(one.job.id, replayed=False)]
    record = await queue.jobs.get(one.job.id)
    assert record is not None
    assert record.job == one.job
    assert record.state is State.QUEUED
    assert record.event_id != "0-0"


async def test_one_script_queues_many_jobs(queue: Queue, make_submission: Make) -> None:
    """Five hundred at once, each queued once, in order."""
    ids = await put(queue, *[make_submission(max_batch=500) for _ in range(500)])
    depth = (await queue.workers.queue_depths())[0]
    assert (depth.queued_jobs, depth.queued_slots) == (500, 500)
    assert await claim_ids(queue, 500) == ids


async def test_the_number_of_submitted_jobs_is_limited(queue: Queue, make_submission: Make) -> None:
    """A long script would block Redis."""
    with pytest.raises(ValueError, match="1 to 500"):
        await queue.jobs.submit([])
    with pytest.raises(ValueError, match="1 to 500"):
        await queue.jobs.submit([make_submission()] * 501)


async def test_a_job_that_cannot_be_written_fails_alone(queue: Queue, make_submission: Make) -> None:
    """Others that the same script queues are of other requests."""
    invalid = make_submission()
    invalid = replace(invalid, job=invalid.job.model_copy(update={"prompt": "\ud800"}))
    first, second = make_submission(), make_submission()
    submissions = [first, invalid, replace(make_submission(), idempotency_key="\ud800"), second]
    results = await queue.jobs.submit(submissions, positions=True)
    assert [type(result) for result in results] == [SubmitResult, InvalidRequest, InvalidRequest, SubmitResult]
    assert await claim_ids(queue) == [first.job.id, second.job.id]
    assert [type(result) for result in await queue.jobs.submit([invalid])] == [InvalidRequest]


async def test_a_submit_sent_twice_is_one_job(queue: Queue, make_submission: Make) -> None:
    """redis-py retries after a timeout: the second submit changes nothing."""
    one = make_submission()
    first, second = await put(queue, one), await put(queue, one)
    assert first == second
    assert len(await claim(queue)) == 1
    assert await claim(queue) == []


async def test_a_submit_sent_again_after_its_end_does_not_run_again(queue: Queue, make_submission: Make) -> None:
    """A retry can arrive late."""
    one = make_submission()
    await put(queue, one)
    assert await end(queue, (await claim(queue))[0])
    await put(queue, one)
    assert await claim(queue) == []
    assert await state_of(queue, one.job.id) is State.SUCCEEDED


async def test_the_same_key_and_body_give_the_same_job(queue: Queue, make_submission: Make) -> None:
    """A client that repeats a request gets its first job, and nothing runs twice."""
    one = make_submission(idempotency_key="k", fingerprint="f")
    two = make_submission(idempotency_key="k", fingerprint="f")
    assert await queue.jobs.submit([one]) == [SubmitResult(one.job.id, replayed=False)]
    assert await queue.jobs.submit([two]) == [SubmitResult(one.job.id, replayed=True)]
    assert await queue.jobs.get(two.job.id) is None
    assert len(await claim(queue)) == 1


async def test_the_same_key_with_another_body_is_refused(queue: Queue, make_submission: Make) -> None:
    """A key names one request; nothing is queued."""
    await put(queue, make_submission(idempotency_key="k", fingerprint="f"))
    (outcome,) = await queue.jobs.submit([make_submission(idempotency_key="k", fingerprint="g")])
    assert isinstance(outcome, IdempotencyMismatch)
    assert len(await claim(queue)) == 1


async def test_a_key_is_its_tenants_own(queue: Queue, make_submission: Make) -> None:
    """Two tenants can use the same key."""
    one = make_submission(idempotency_key="k", fingerprint="f", tenant="a")
    two = make_submission(idempotency_key="k", fingerprint="g", tenant="b")
    assert await put(queue, one, two) == [one.job.id, two.job.id]


async def test_keys_are_kept_apart_in_one_script(queue: Queue, make_submission: Make) -> None:
    """Lines of one bulk request that repeat a key are detected."""
    sent = [make_submission(idempotency_key=key, fingerprint="f") for key in ("a b", "a", "a b")]
    outcomes = await queue.jobs.submit(sent)
    assert outcomes == [
        SubmitResult(sent[0].job.id, False),
        SubmitResult(sent[1].job.id, False),
        SubmitResult(sent[0].job.id, True),
    ]


async def test_a_key_whose_job_was_deleted_makes_no_second_job(queue: Queue, make_submission: Make) -> None:
    """One job per key for `idempotency_s`, however short its job is kept."""
    one = make_submission(idempotency_key="k", fingerprint="f")
    await put(queue, one)
    await queue.jobs.cancel(one.job.id)
    await queue.jobs.forget(one.job.id)
    two = make_submission(idempotency_key="k", fingerprint="f")
    assert await queue.jobs.submit([two]) == [SubmitResult(one.job.id, replayed=True)]
    assert await queue.jobs.submitted_before("default", "k", "f") == SubmitResult(one.job.id, replayed=True)
    (other_body,) = await queue.jobs.submit([make_submission(idempotency_key="k", fingerprint="g")])
    assert isinstance(other_body, IdempotencyMismatch)
    assert await claim_ids(queue) == []


async def test_a_full_queue_gives_a_retry_time(queue_with: Callable[..., Queue], make_submission: Make) -> None:
    """Each job has its own outcome: what fits is queued."""
    queue = queue_with(max_queued_jobs=2)
    outcomes = await queue.jobs.submit([make_submission() for _ in range(3)])
    assert [type(outcome) for outcome in outcomes] == [SubmitResult, SubmitResult, QueueFull]
    assert isinstance(outcomes[2], QueueFull)
    assert 1 <= outcomes[2].retry_after_s <= 60
    completions = queue.client.redis_keys.completions
    await queue.client.redis.hset(completions, "done_gap", "1000000.5")
    await queue.client.redis.expire(completions, 60)
    (refused,) = await queue.jobs.submit([make_submission()])
    assert isinstance(refused, QueueFull)
    assert refused.retry_after_s == 21
    await claim(queue, 1)
    await put(queue, make_submission())


async def test_one_tenant_cannot_fill_the_queue(queue_with: Callable[..., Queue], make_submission: Make) -> None:
    """Each tenant has its own limit."""
    queue = queue_with(max_queued_jobs_per_tenant=1)
    outcomes = await queue.jobs.submit(
        [make_submission(tenant="a"), make_submission(tenant="a"), make_submission(tenant="b")]
    )
    assert [type(outcome) for outcome in outcomes] == [SubmitResult, QueueFull, SubmitResult]
    assert "tenant 'a'" in str(outcomes[1])


@pytest.mark.parametrize(
    ("limits", "queued"),
    [
        ({}, {"a": 6, "b": 3, "c": 2, "d": 1}),
        ({"a": 3}, {"a": 3, "b": 5, "c": 2, "d": 1}),
        ({"a": 8}, {"a": 8, "b": 2, "c": 1, "d": 1}),
    ],
    ids=["none alike", "a small limit", "one above half"],
)
async def test_tenants_leave_room_in_the_queue_for_others(
    queue_with: Callable[..., Queue], make_submission: Make, limits: dict[str, int], queued: dict[str, int]
) -> None:
    """A tenant alone fills the queue up to its limit; each further one gets as much as it leaves."""
    queue = queue_with(max_queued_jobs=12, max_queued_jobs_per_tenant=6)
    for tenant, most in limits.items():
        await queue.api_keys.set_limits(tenant, TenantLimits(queued_jobs=most))
    for tenant, count in queued.items():
        outcomes = await queue.jobs.submit([make_submission(tenant=tenant) for _ in range(12)])
        assert sum(isinstance(outcome, SubmitResult) for outcome in outcomes) == count, tenant


async def test_a_replay_succeeds_when_the_queue_is_full(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """A client that lost its response gets it, however long the queue."""
    queue = queue_with(max_queued_jobs=1)
    one = make_submission(idempotency_key="k", fingerprint="f")
    await put(queue, one)
    again = make_submission(idempotency_key="k", fingerprint="f")
    assert await queue.jobs.submit([again]) == [SubmitResult(one.job.id, replayed=True)]


async def test_an_input_lives_as_long_as_a_job_uses_it(
    queue: Queue, make_job: Callable[..., Job], make_submission: Make
) -> None:
    """The sweep keeps the image of a queued job; unused, it has its own retention."""
    ref = input_named("1")
    await queue.inputs.put("default", ref, 100)
    assert await queue.inputs.keep("default", "in_1", 100) == ref
    assert await queue.inputs.keep("other", "in_1", 100) is None
    one = make_submission(images=(ref,))
    await put(queue, one)
    name, row = queue.client.redis_keys.input("default", "in_1"), "input|default|in_1|p.png"
    assert await queue.client.redis.pttl(name) == -1
    await queue.client.redis.zadd(queue.client.redis_keys.retention, {row: 1})
    assert await queue.maintenance.expired_items() == []
    await queue.jobs.cancel(one.job.id)
    assert await queue.client.redis.pttl(name) > 0
    await queue.client.redis.zadd(queue.client.redis_keys.retention, {row: 1})
    (doomed,) = await queue.maintenance.expired_items()
    assert (doomed.kind, doomed.prefix) == ("input", "inputs/default/in_1/p.png")
    assert await queue.inputs.get_many("default", ["in_1"]) == [None]


def input_named(name: str, upload: str = "p.png") -> InputRef:
    key = f"inputs/default/in_{name}/{upload}"
    return InputRef(id=f"in_{name}", key=key, content_type="image/png", bytes=3, width=8, height=8)


@pytest.mark.parametrize("way", ["deleted", "expired", "deleted and uploaded again"])
async def test_a_job_is_refused_if_an_input_is_deleted_before_it_is_queued(
    queue: Queue, make_submission: Make, way: str
) -> None:
    """By the field that names it; nothing is left of the job. The object of a second upload is another one."""
    for name in "ab":
        await queue.inputs.put("default", input_named(name), 100)
    one = make_submission(images=(input_named("a"), input_named("b")), idempotency_key="k", fingerprint="x")
    if way == "expired":
        await end_retention(queue, "in_b")
    else:
        assert await queue.maintenance.forget_input("default", "in_b") is not None
    if way == "deleted and uploaded again":
        await queue.inputs.put("default", input_named("b", "q.png"), 100)
    (refused,) = await queue.jobs.submit([one])
    assert isinstance(refused, InvalidRequest)
    assert (refused.param, "in_b" in refused.message) == ("images.1", True)
    assert await queue.jobs.get(one.job.id) is None
    assert await queue.jobs.submitted_before("default", "k", "x") is None
    (kept,) = await queue.inputs.get_many("default", ["in_a"])
    assert kept is not None
    assert kept.expires_at_ms is not None


async def test_a_job_is_refused_if_its_adapter_is_deleted_before_it_is_queued(
    queue: Queue, make_submission: Make
) -> None:
    ids = [new_id("adapter") for _ in range(2)]
    for adapter_id in ids:
        about = {"model": "demo", "name": "ink", "sha256": "", "created_at_ms": 1}
        await queue.adapters.begin("default", adapter_id, 1, 1)
        await queue.adapters.put("default", UploadedAdapter(id=adapter_id, bytes=1, parts=1, **about))
    one = make_submission(adapters=tuple(Adapter(id=adapter_id) for adapter_id in ids))
    await queue.adapters.forget("default", ids[1])
    (refused,) = await queue.jobs.submit([one])
    assert isinstance(refused, InvalidRequest)
    assert (refused.param, ids[1] in refused.message) == ("adapters.1.id", True)
    assert (await queue.adapters.forget("default", ids[0])).id == ids[0]


async def test_a_repeated_submit_finds_its_job_although_an_input_is_gone(queue: Queue, make_submission: Make) -> None:
    await queue.inputs.put("default", input_named("a"), 100)
    one = make_submission(images=(input_named("a"),), idempotency_key="k", fingerprint="x")
    await put(queue, one)
    await queue.jobs.cancel(one.job.id)
    assert await queue.maintenance.forget_input("default", "in_a") is not None
    again = make_submission(images=(input_named("a"),), idempotency_key="k", fingerprint="x")
    assert await queue.jobs.submit([again]) == [SubmitResult(one.job.id, replayed=True)]


async def test_all_inputs_of_a_job_live_as_long_as_it_uses_them(queue: Queue, make_submission: Make) -> None:
    """Images to edit, the mask, the last image; one that two jobs use outlives the first job."""
    refs = {name: input_named(name) for name in ("a", "b", "mask", "last")}
    for ref in refs.values():
        await queue.inputs.put("default", ref, 100)
    a, b, mask, last = refs.values()
    one = make_submission(images=(a, b, a), mask=mask, last_image=last)
    two = make_submission(images=(b,))
    await put(queue, one, two)

    async def held() -> set[str]:
        names = {name: queue.client.redis_keys.input("default", f"in_{name}") for name in refs}
        return {name for name, key in names.items() if await queue.client.redis.pttl(key) == -1}

    assert await held() == {"a", "b", "mask", "last"}
    await queue.jobs.cancel(one.job.id)
    assert await held() == {"b"}
    await queue.jobs.cancel(two.job.id)
    assert await held() == set()


async def test_an_idle_queue_has_no_lanes(queue: Queue, make_submission: Make) -> None:
    """When all jobs have ended, no lane, group, index of lanes or signature is left."""
    await put(queue, *[make_submission(priority=priority, width=width) for priority in Priority for width in (64, 128)])
    while claims := await claim(queue):
        for one in claims:
            await end(queue, one)
    kinds = {name.partition(":")[0] for name in await names_left(queue)}
    assert kinds <= {
        "job",
        "jobs",
        "events",
        "wakeup",
        "arrivals",
        "completions",
        "retention",
        "spent",
        "footprint",
        "model_holders",
        "bulk_credit",
        "usage",
        "usage_rows",
    }


async def test_the_index_drops_rows_of_jobs_that_are_gone(queue: Queue, make_submission: Make) -> None:
    """Without a sweep the index stays bounded, too."""
    ids = await put(queue, make_submission(), make_submission())
    for one in await claim(queue):
        await end(queue, one)
    await queue.client.redis.delete(*[queue.client.redis_keys.job(job_id) for job_id in ids])
    (new,) = await put(queue, make_submission())
    assert await queue.client.redis.zrange(queue.client.redis_keys.jobs("default"), 0, -1) == [new]


async def test_all_keys_share_one_hash_tag(queue: Queue, make_submission: Make) -> None:
    """Cluster-mode services run a script only if all its keys are in one slot."""
    before = {name async for name in queue.client.redis.scan_iter(count=1000)}
    await put(queue, make_submission(time_limit_ms=2**32, batch_id="b"))
    await end(queue, (await claim(queue))[0])
    made = {name async for name in queue.client.redis.scan_iter(count=1000)} - before
    assert made
    assert all(name.startswith(f"{{fq:{queue.client.settings.namespace}}}:") for name in made)


async def test_namespaces_do_not_see_each_other(queue_with: Callable[..., Queue], make_submission: Make) -> None:
    """Pools share only the Redis server."""
    one, two = queue_with(), queue_with()
    (job_id,) = await put(one, make_submission())
    assert await claim(two) == []
    assert await two.jobs.get(job_id) is None
