"""Redis at `maxmemory`: running work ends, and only what clients add is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from harness.queue import claim, claim_ids, come_due, end, lose, put, state_of

from shared.auth import TenantLimits
from shared.batch import Batch, File, Part
from shared.config.adapters import UploadedAdapter
from shared.errors import RedisFull
from shared.job import InputRef, Phase, State
from shared.job_fields import Priority
from shared.job_record import Outcome, Progress
from shared.queue import Claim, ProgressReport, Queue, Submission, WorkerInfo
from shared.queue.batches import BatchUpdate
from shared.queue.maintenance.changes import JobUpdate
from shared.queue.maintenance.model_orders import ModelAction, ModelOrder
from shared.queue.maintenance.pauses import Pause, PauseKind
from shared.queue.maintenance.recount import Recount
from shared.queue.maintenance.repairs import Repairs
from shared.queue.order.decision import ChosenJob, Decision
from shared.queue.scripts import PARTS, runs_when_full, script_files
from shared.queue.tenants.webhooks import DeliveryAttempt
from shared.runtime.clock import now_ms
from shared.webhooks import AttemptOutcome, DeliveryState, SigningSecret, WebhookEndpoint, new_secret

Make = Callable[..., Submission]
ENDPOINT = WebhookEndpoint(
    id="we_1",
    url="https://x.test",
    states=(State.SUCCEEDED,),
    secrets=(SigningSecret(secret=new_secret()),),
    created_at_ms=0,
)
INPUT = InputRef(id="in_1", key="inputs/default/in_1/a", content_type="image/png", bytes=1, width=64, height=64)
LIFE = {"created_at_ms": 0, "expires_at_ms": 2**50}
FILE = File(id="file_1", tenant="default", filename="a", purpose="batch", bytes=1, **LIFE)
BATCH = Batch(
    id="batch_1",
    tenant="default",
    endpoint="/v1/jobs",
    input_file_id=FILE.id,
    base_url="",
    output_file_id="file_o",
    error_file_id="file_e",
    **LIFE,
)
ADAPTER = UploadedAdapter(id="adapter_1", model="demo", name="ink", bytes=1, parts=1, sha256="", created_at_ms=0)
SCRIPTS = sorted(name for name, path in script_files().items() if path.parent.name not in PARTS)


@contextlib.asynccontextmanager
async def full(queue: Queue) -> AsyncIterator[None]:
    """Redis has used more than its `maxmemory`."""
    await queue.client.redis.config_set("maxmemory", 1)
    try:
        yield
    finally:
        await queue.client.redis.config_set("maxmemory", 0)


DIGESTS = """
local out = {}
for at, name in ipairs(KEYS) do
  if redis.call('TYPE', name).ok == 'hash' then -- a dump has the order of its table, which a growing one changes
    local fields, rows = redis.call('HGETALL', name), {}
    for pair = 1, #fields, 2 do table.insert(rows, fields[pair] .. '=' .. fields[pair + 1]) end
    table.sort(rows)
    out[at] = redis.sha1hex(table.concat(rows, '|'))
  else
    out[at] = redis.sha1hex(redis.call('DUMP', name))
  end
end
return out
"""


async def contents(queue: Queue) -> dict[str, str]:
    """Return every key of the namespace with the digest of its value."""
    redis, prefix = queue.client.redis, queue.client.redis_keys.prefix
    pattern = prefix.replace("{", "\\{").replace("}", "\\}") + "*"
    names = [name async for name in redis.scan_iter(match=pattern, count=1000)]
    return dict(zip(names, await redis.eval(DIGESTS, len(names), *names), strict=True))


@dataclass
class Scene:
    """What the scripts are called with: jobs in several states, and one row of everything else."""

    queue: Queue
    queued: Submission
    running: Claim
    new: Submission
    key_id: str
    dead: str
    stopped: str

    @property
    def signature(self) -> str:
        return self.queued.signature

    @property
    def call(self) -> tuple[str, str, str]:
        """A synchronous call for the running job."""
        return "default", "digest", self.running.job.id


async def prepared(queue: Queue, make_submission: Make) -> Scene:
    running, lost, dead, ended, queued = [make_submission() for _ in range(5)]
    for one in (running, lost, dead, ended, queued):
        await put(queue, one)
    claims = {one.job.id: one for one in await claim(queue, 4)}
    await lose(queue, lost.job.id)
    await end(queue, claims[ended.job.id])
    await end(queue, claims[dead.job.id], state=State.FAILED)
    await queue.dead_letters.bury(dead.job.id, "worker_lost", "")
    await recount(queue).begin()
    await queue.pauses.set(Pause(PauseKind.TENANT, "paused", "", 0))
    _, key = await queue.api_keys.create("default", frozenset())
    await queue.files.begin("default", "file_1", 1)
    await queue.files.put(FILE, [Part("part", 1)])
    await queue.batches.create(BATCH)
    await queue.webhooks.create_endpoint("default", ENDPOINT)
    await queue.webhooks.send_test("default", ENDPOINT, "known")
    await queue.sync_calls.start("default", "digest", running.job.id)
    await queue.adapters.begin("default", ADAPTER.id, 1, 1)
    (stopped,) = await put(queue, make_submission())
    await queue.jobs.pause(stopped)
    (later,) = await put(queue, make_submission(not_before_ms=now_ms() + 3_600_000))
    await come_due(queue, later)
    return Scene(queue, queued, claims[running.job.id], make_submission(), key.id, dead.job.id, stopped)


def arguments(scene: Scene) -> Mapping[str, tuple[Any, ...]]:
    """Return the arguments of each script, with which it has something to write."""
    job, epoch, queued = scene.running.job.id, scene.running.epoch, scene.queued.job.id
    signature, models = scene.signature, ("demo", 0)
    return {
        "admit": ("default", 60),
        "cancel_jobs": (queued,),
        "pause_jobs": (queued,),
        "resume_jobs": (scene.stopped,),
        "heartbeat": ("w2", "{}", 1000, "demo", "digest", "demo"),
        "queue_due": (10,),
        "read_places": (queued,),
        "reclaim": (10, 1, 0, 0),
        "give_up": ("w1", None, job, epoch),
        "read_order": ("w2", "token", "", 0, True, *models),
        "read_lanes": ("w2", signature, 8, 2, 0, ""),
        "take": (
            "w2",
            "token",
            signature,
            True,
            Decision(take=[ChosenJob(queued, 0, "lane", 1, "default", 1)]).wire([], 0.0),
        ),
        "defer": ("paused", "demo", 1, 1, ""),
        "renew": ("w1", job, epoch),
        "report_progress": (job, epoch, 1, "denoising", 1, 8),
        "read_replies": ('[["GET", "any"]]',),
        "transact": (False, "[]", '[["SET", "any", "value"]]'),
        "list_as_waiting": ("w2", 1000, "", True, "", *models),
        "settle": (
            *("w1", job, epoch, "token", "succeeded", "[]", None, '{"mean_rows": 1}', "{}", 0.5, 8, 8, 1, 9, ""),
            *("500000,8,0,1,0,9", None, "", 0),
        ),
        "keep_checkpoint": ("w1", job, epoch, '{"images":[]}', "0,13,0,0", 0, 1.0),
    }


REFUSED = {
    "submit",
    "transact",  # unless its caller says so, as those of `OPERATIONS`
}
READ_ONLY = {"read_places", "read_replies"}


def recount(queue: Queue) -> Recount:
    return Recount(queue.client, "token", lambda: asyncio.sleep(0))


async def forget_deleted_adapter(scene: Scene) -> None:
    item = await scene.queue.adapters.forget("default", ADAPTER.id)
    await scene.queue.maintenance.forget_item(item)


REFUSED_OPERATIONS = {
    *("begin_adapter", "begin_file", "create_batch", "create_key", "put_input", "put_preview", "reserve_key"),
    "create_endpoint",
    "redeliver",
    "send_test",
}
OPERATIONS: dict[str, Callable[[Scene], Awaitable[object]]] = {
    "begin_adapter": lambda scene: scene.queue.adapters.begin("default", "adapter_2", 1, 1),
    "begin_file": lambda scene: scene.queue.files.begin("default", "file_2", 1),
    "cancel_batch": lambda scene: scene.queue.batches.cancel("default", "batch_1"),
    "commit_batch": lambda scene: scene.queue.batches.commit(BATCH, BatchUpdate({}), 1000),
    "create_batch": lambda scene: scene.queue.batches.create(BATCH.model_copy(update={"id": "batch_2"})),
    "due_batches": lambda scene: scene.queue.batches.due(10, {}, 1000),
    "forget_adapter": lambda scene: scene.queue.adapters.forget("default", ADAPTER.id),
    "postpone_batch": lambda scene: scene.queue.batches.postpone("default", "batch_1", 1000),
    "put_adapter": lambda scene: scene.queue.adapters.put("default", ADAPTER),
    "put_file": lambda scene: scene.queue.files.put(FILE, [Part("part", 1)]),
    "forget_item": forget_deleted_adapter,
    "end_batch": lambda scene: scene.queue.batches.commit(BATCH, BatchUpdate({"status": "completed"}), None),
    "abandon_file": lambda scene: scene.queue.files.abandon("default", "file_3"),
    "abandon_sync_call": lambda scene: scene.queue.sync_calls.abandon(*scene.call, 1),
    "announce_policies": lambda scene: scene.queue.policies.announce("api"),
    "create_key": lambda scene: scene.queue.api_keys.create("default", frozenset()),
    "bury_job": lambda scene: scene.queue.dead_letters.bury(scene.running.job.id, "worker_lost", ""),
    "count_dead_letters": lambda scene: scene.queue.dead_letters.count(),
    "expired_items": lambda scene: scene.queue.maintenance.expired_items(),
    "count_run": lambda scene: scene.queue.claims.count_run(scene.running.job, "token", Outcome(state=State.CANCELED)),
    "expire": lambda scene: scene.queue.maintenance.expire(),
    "lose": lambda scene: scene.queue.claims.lose(
        "w1", {scene.running.job.id: scene.running.epoch}, "the engine ended"
    ),
    "put_input": lambda scene: scene.queue.inputs.put("default", INPUT, 60),
    "update_jobs": lambda scene: scene.queue.changes.update([scene.queued.job.id], JobUpdate(Priority.BULK, 5_000)),
    "forget_job": lambda scene: scene.queue.jobs.forget(scene.dead),
    "purge_dead_letter": lambda scene: scene.queue.dead_letters.purge(scene.dead),
    "reconcile_jobs": lambda scene: Repairs(scene.queue.client).check_jobs(
        [scene.running.job.id, scene.queued.job.id, scene.dead]
    ),
    "reconcile_lanes": lambda scene: Repairs(scene.queue.client).check_lanes([f"{scene.signature}|standard|default"]),
    "repair_queued": lambda scene: recount(scene.queue).signatures([scene.signature], Counter()),
    "repair_tenants": lambda scene: recount(scene.queue).tenants("queued", {"default": 9}, ()),
    "redrive_dead_letter": lambda scene: scene.queue.dead_letters.redrive(scene.dead),
    "forget_input": lambda scene: scene.queue.maintenance.forget_input("default", "in_1"),
    "join_sync_call": lambda scene: scene.queue.sync_calls.join("default", "digest", waited_for=True),
    "learn_cost": lambda scene: scene.queue.workers.learn_cost("cpu", "demo", "64x64", 1, 0.5),
    "learn_start_time": lambda scene: scene.queue.workers.learn_start_time(1.0),
    "leave_sync_call": lambda scene: scene.queue.sync_calls.leave(*scene.call),
    "note_use": lambda scene: scene.queue.api_keys.note_use(scene.key_id),
    "order_model": lambda scene: scene.queue.model_orders.put(ModelOrder("one", "demo", ModelAction.LOAD, 0)),
    "pause": lambda scene: scene.queue.pauses.set(Pause(PauseKind.ALL, "", "", 0)),
    "put_preview": lambda scene: scene.queue.previews.put(scene.running.job.id, scene.running.epoch, 0, 0, b"x"),
    "queue_depths": lambda scene: scene.queue.workers.load(),
    "reserve_key": lambda scene: scene.queue.jobs.reserve_key("default", "key", "print", "batch_1"),
    "resume": lambda scene: scene.queue.pauses.end(PauseKind.TENANT, "paused"),
    "revoke_key": lambda scene: scene.queue.api_keys.revoke(scene.key_id),
    "set_limits": lambda scene: scene.queue.api_keys.set_limits("default", TenantLimits(running_slots=8)),
    "start_sync_call": lambda scene: scene.queue.sync_calls.start("default", "digest", "batch_1"),
    "claim_deliveries": lambda scene: scene.queue.webhooks.claim_deliveries(10, 10, {}, 1000),
    "create_endpoint": lambda scene: scene.queue.webhooks.create_endpoint(
        "default", ENDPOINT.model_copy(update={"id": "we_2"})
    ),
    "delete_endpoint": lambda scene: scene.queue.webhooks.delete_endpoint("default", "we_1"),
    "expand_outbox": lambda scene: scene.queue.webhooks.expand_outbox(10),
    "record_attempt": lambda scene: scene.queue.webhooks.record_attempt(
        "known.we_1", AttemptOutcome(DeliveryState.DELIVERED), DeliveryAttempt(at_ms=0, status=200)
    ),
    "redeliver": lambda scene: scene.queue.webhooks.redeliver("default", "known.we_1"),
    "send_test": lambda scene: scene.queue.webhooks.send_test("default", ENDPOINT, "new"),
}
"""Transactions by their methods."""


def test_a_script_that_writes_runs_when_redis_is_full_unless_it_is_listed() -> None:
    """Its header says so, `-- RUNS when Redis is full`."""
    assert {name for name in SCRIPTS if not runs_when_full(name)} == REFUSED | READ_ONLY


@pytest.mark.every_redis
@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_script_runs_when_redis_is_full_unless_it_adds_what_a_client_sends(
    queue: Queue, make_submission: Make, name: str
) -> None:
    """What is refused has changed nothing."""
    scene = await prepared(queue, make_submission)
    before = await contents(queue)
    async with full(queue):
        if name == "submit":
            with pytest.raises(RedisFull):
                await queue.jobs.submit([scene.new])
        elif name in REFUSED:
            with pytest.raises(RedisFull, match="no memory left"):
                await getattr(queue.client.scripts, name)(*arguments(scene)[name])
        else:
            await getattr(queue.client.scripts, name)(*arguments(scene)[name])
            return
    assert await contents(queue) == before


@pytest.mark.every_redis
@pytest.mark.parametrize("name", OPERATIONS)
async def test_a_transaction_runs_when_redis_is_full_unless_it_adds_what_a_client_sends(
    queue: Queue, make_submission: Make, name: str
) -> None:
    """What is refused has changed nothing."""
    scene = await prepared(queue, make_submission)
    before = await contents(queue)
    async with full(queue):
        if name not in REFUSED_OPERATIONS:
            await OPERATIONS[name](scene)
            return
        with pytest.raises(RedisFull, match="no memory left"):
            await OPERATIONS[name](scene)
    assert await contents(queue) == before


async def test_claimed_and_queued_jobs_end_while_redis_is_full(queue: Queue, make_submission: Make) -> None:
    """No job is lost or run again; submits are refused, replayed ones are not, and new ones are accepted afterwards."""
    first = make_submission()
    ids = await put(queue, first, *(make_submission() for _ in range(3)))
    running = await claim(queue, 2)
    async with full(queue):
        with pytest.raises(RedisFull):
            await queue.jobs.submit([make_submission()])
        assert await put(queue, first) == [first.job.id]
        assert not (await queue.claims.renew("w1", {one.job.id: one.epoch for one in running})).lost
        report = ProgressReport(running[0].job.id, running[0].epoch, Phase.DENOISING, Progress(step=1, total=8))
        assert await queue.claims.report_progress(report) == 1
        assert all([await end(queue, one) for one in running])
        others = await claim(queue)
        assert await queue.claims.release("w1", {others[0].job.id: others[0].epoch}) == 1
        assert all([await end(queue, one) for one in (*others[1:], *await claim(queue))])
        assert await queue.maintenance.reclaim() == []
        assert [await state_of(queue, job_id) for job_id in ids] == [State.SUCCEEDED] * 4
        assert await queue.dead_letters.count() == 0
    assert await claim_ids(queue, slots=1) == []
    await put(queue, make_submission())


async def test_processes_start_and_read_while_redis_is_full(queue: Queue) -> None:
    """A restarted worker or API serves what is there; heartbeats and API keys work."""
    await queue.check()
    secret = await queue.api_keys.url_secret()
    async with full(queue):
        await queue.check()
        assert await queue.api_keys.url_secret() == secret
        await queue.workers.heartbeat(WorkerInfo(id="w1", models=("demo",)), ("demo",))
        assert [worker.id for worker in await queue.workers.all()] == ["w1"]
        assert (await queue.api_keys.admit("default", 60)).allowed


async def test_a_stored_input_is_found_again_while_redis_is_full(queue: Queue) -> None:
    """The same image needs no memory; a new one is refused."""
    ref = INPUT
    await queue.inputs.put("default", ref, 60)
    async with full(queue):
        assert await queue.inputs.put("default", ref, 60) == ref
        assert await queue.inputs.keep("default", ref.id, 60) == ref
        with pytest.raises(RedisFull):
            await queue.inputs.put("default", ref.model_copy(update={"id": "in_2"}), 60)
