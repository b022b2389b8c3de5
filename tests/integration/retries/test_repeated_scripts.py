"""Every script that the client sends again after a lost reply: the same reply, and nothing more is changed."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from harness.queue import MODELS, claim, come_due, end, lose, miss_deadline, put

from shared.auth import TenantLimits
from shared.batch import Batch, File, Part
from shared.config.adapters import Adapter, UploadedAdapter
from shared.errors import Conflict
from shared.job import InputRef, Phase, State
from shared.job_fields import OnDeadline, Priority
from shared.job_record import Outcome, Progress
from shared.queue import Queue, Submission
from shared.queue.batches import BatchUpdate
from shared.queue.checkpoints import JobCheckpoint, StoredImage
from shared.queue.maintenance.changes import JobUpdate
from shared.queue.maintenance.model_orders import ModelAction, ModelOrder
from shared.queue.maintenance.pauses import Pause, PauseKind
from shared.queue.records import ProgressReport, WorkerInfo
from shared.queue.scripts import PARTS, REPLAYED, script_files
from shared.queue.tenants.webhooks import DeliveryAttempt
from shared.runtime.clock import new_id, now_ms
from shared.webhooks import AttemptOutcome, DeliveryState, SigningSecret, WebhookEndpoint, new_secret

Make = Callable[..., Submission]
Case = Callable[[Queue, Make], Awaitable[None]]

SCRIPTS = {name for name, path in script_files().items() if path.parent.name not in PARTS}
REPLY_DIFFERS = {
    **dict.fromkeys(("reclaim", "queue_due"), "takes the next rows of a list"),
    **dict.fromkeys(("read_replies", "read_order", "read_lanes"), "reads how long ago or how soon"),
}
TIME = re.compile(r"\b1[6-9]\d{11}(\.\d+)?(-\d+)?\b")
SECRET = (SigningSecret(secret=new_secret()),)


class Repeater:
    """Runs each script twice with the same arguments, as the client does when a reply is lost, and compares."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.seen = queue, set[str]()
        queue.client.shared = None  # all commands go through the pools
        self._names: dict[str, str] = {}
        self._send = queue.client.redis.execute_command
        for client in {queue.client.redis, queue.client.renewals}:
            client.execute_command = partial(self._execute, client.execute_command)

    async def _execute(self, send: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
        if args[0] != "EVALSHA":
            return await send(*args, **options)
        name = self._name(args[1])
        first = await send(*args, **options)
        before = await self._state()
        second = await send(*args, **options)
        after = await self._state()
        self.seen.add(name)
        if name not in REPLY_DIFFERS:
            assert _timeless(second) == _timeless(first), name
        assert after == before, name
        return first

    def _name(self, sha: str) -> str:
        if sha not in self._names:
            self._names = {script.sha: name for name, script in self.queue.client._loaded.items()}
        return self._names[sha]

    async def _state(self) -> dict[str, str]:
        prefix = self.queue.client.redis_keys.prefix
        pattern = prefix.replace("{", "\\{").replace("}", "\\}") + "*"
        names = [name async for name in self.queue.client.redis.scan_iter(match=pattern, count=1000)]
        kept = [name for name in names if not name.startswith(f"{prefix}reply:")]
        return {_timeless(name): _timeless(await self._read(name)) for name in sorted(kept)}

    async def _read(self, name: str) -> Any:
        send = self._send
        match await send("TYPE", name):
            case "hash":
                return sorted((await send("HGETALL", name)).items())
            case "zset":
                return await send("ZRANGE", name, 0, -1, "WITHSCORES")
            case "list":
                return await send("LRANGE", name, 0, -1)
            case "set":
                return sorted(await send("SMEMBERS", name))
            case "stream":
                return await send("XRANGE", name, "-", "+")
            case _:
                return await send("GET", name)


def _timeless(value: Any) -> str:
    return TIME.sub("T", json.dumps(value, default=str))


CASES: dict[str, tuple[Case, set[str]]] = {}


def case(*scripts: str) -> Callable[[Case], Case]:
    """Add a case that runs `scripts`, and perhaps others."""

    def add(build: Case) -> Case:
        CASES[build.__name__] = (build, set(scripts))
        return build

    return add


@case("submit", "pause_jobs", "resume_jobs")
async def pauses_of_jobs(queue: Queue, make: Make) -> None:
    (running,) = await put(queue, make())
    await claim(queue)
    (queued,) = await put(queue, make())
    for job_id in (queued, running):
        await queue.jobs.pause(job_id)
    for job_id in (queued, running):
        await queue.jobs.resume(job_id)


@case("submit", "queue_due", "pause_jobs", "resume_jobs")
async def jobs_for_later(queue: Queue, make: Make) -> None:
    due_ms = now_ms() + 3_600_000
    one, two, three = await put(queue, *(make(not_before_ms=due_ms, time_limit_ms=limit) for limit in (None, 9, None)))
    await queue.jobs.pause(three)
    await queue.jobs.resume(three)
    await come_due(queue, one, two)
    await queue.maintenance.queue_due()


@case("submit", "settle", "queue_due")
async def jobs_that_wait_for_others(queue: Queue, make: Make) -> None:
    first, second = await put(queue, make(), make())
    await put(queue, make(after=(first,)), make(after=(first, second)))
    for one in await claim(queue):
        await end(queue, one, state=State.SUCCEEDED if one.job.id == first else State.FAILED)


@case("submit", "read_places", "cancel_jobs", "transact")
async def jobs(queue: Queue, make: Make) -> None:
    one, two = await put(queue, make(idempotency_key="k", fingerprint="f"), make())
    await queue.jobs.position(two)
    await queue.jobs.cancel(one)
    assert await queue.jobs.forget(one)
    await queue.jobs.cancel((await claim(queue))[0].job.id)
    ref = InputRef(id="in_a", key="inputs/acme/in_a/x", content_type="image/png", bytes=1, width=8, height=8)
    assert await queue.inputs.put("acme", ref, 60) == ref
    item = await queue.maintenance.forget_input("acme", ref.id)
    assert item is not None
    await queue.maintenance.forget_item(item)
    assert await queue.jobs.reserve_key("acme", "key", "print", "batch_a") == "batch_a"


@case("transact")
async def changes(queue: Queue, make: Make) -> None:
    jobs = await put(queue, *[make(time_limit_ms=60_000) for _ in range(2)], make(priority=Priority.BULK))
    for priority in (Priority.BULK, Priority.STANDARD):
        assert await queue.changes.update(jobs, JobUpdate(priority, 5_000)) == [State.QUEUED] * 3
    assert await queue.changes.update(jobs, JobUpdate(time_limit_ms=0)) == [State.QUEUED] * 3
    await claim(queue, 1)
    assert State.RUNNING in await queue.changes.update(jobs, JobUpdate(Priority.INTERACTIVE))


@case("list_as_waiting", "give_up")
async def waits_and_losses(queue: Queue, make: Make) -> None:
    await queue.wakeups.list_as_waiting("w2", MODELS, wait_s=60)
    await put(queue, make())
    wakeup = await queue.wakeups.wait("w2", 1)
    assert wakeup is not None
    for worker in ("w3", "w4"):
        await queue.wakeups.list_as_waiting(worker, MODELS, wait_s=60)
    await queue.wakeups.stop_waiting("w2", unused=(wakeup,))
    (one,) = await claim(queue, 1)
    assert await queue.claims.lose("w1", {one.job.id: one.epoch}, "the engine ended") == 1
    (again,) = await claim(queue, 1)
    assert await end(queue, again)


@case("defer")
async def limits(queue: Queue, make: Make) -> None:
    await queue.api_keys.set_limits("acme", TenantLimits(running_slots=1))
    await put(queue, *[make(tenant="acme") for _ in range(2)])
    await claim(queue, 1)
    assert await claim(queue, 1) == []


@case(
    *("read_order", "read_lanes", "take", "renew", "report_progress", "keep_checkpoint", "give_up", "settle"),
    "transact",
)
async def claims(queue: Queue, make: Make) -> None:
    await put(queue, *[make() for _ in range(4)])
    await queue.claims.next_ready_ms(MODELS, worker="w1")
    (one,) = await claim(queue, 1)
    two, three = await queue.claims.join("w1", one.signature, 2, models=MODELS)
    assert await queue.claims.join("w1", one.signature, 8, models=MODELS) != []
    await queue.claims.renew("w1", {one.job.id: one.epoch})
    await queue.claims.report_progress(
        ProgressReport(one.job.id, one.epoch, Phase.DENOISING, Progress(step=1, total=2))
    )
    image = StoredImage(key="jobs/x/checkpoints/1-1-0.safetensors", bytes=9, sha256="", step=1, total=2)
    assert await queue.claims.keep_checkpoint("w1", one, JobCheckpoint(images=(image,))) == "kept"
    assert await queue.previews.put(one.job.id, one.epoch, 0, 0, b"x")
    assert await queue.claims.release("w1", {two.job.id: two.epoch}) == 1
    assert await end(queue, one, device_seconds=1.0)
    assert await end(queue, three)
    assert await queue.claims.count_run(two.job, "token", Outcome(state=State.CANCELED, device_seconds=1.0))


@case("heartbeat", "transact")
async def workers(queue: Queue, make: Make) -> None:
    await put(queue, make())
    await queue.policies.announce("worker")
    await queue.workers.heartbeat(WorkerInfo("w1", MODELS), MODELS)
    for seconds in (1.0, 2.0):
        await queue.workers.learn_cost("cpu", "demo", "64x64", 1, seconds)
        await queue.workers.learn_start_time(seconds)
    await queue.workers.load()


@case("reclaim", "transact")
async def maintenance(queue: Queue, make: Make) -> None:
    redis, keys = queue.client.redis, queue.client.redis_keys
    (lost,) = await put(queue, make())
    await claim(queue, 1)
    late, runs_on = await put(queue, *[make(time_limit_ms=60_000, on_deadline=choice) for choice in OnDeadline])
    await lose(queue, lost)
    await queue.maintenance.reclaim()
    await miss_deadline(queue, late, runs_on)
    await queue.maintenance.expire()
    await put(queue, make())
    await redis.hset(keys.running_slots, "acme", 3)
    await redis.hset(keys.queued_jobs, "*", 7)
    await queue.maintenance.reconcile()
    await redis.zadd(keys.retention, {f"job|default|{late}|": 1})
    (item,) = await queue.maintenance.expired_items()
    await queue.maintenance.forget_item(item)


@case("transact")
async def dead_letters(queue: Queue, make: Make) -> None:
    bad, good = await put(queue, make(), make())
    await queue.client.redis.hset(queue.client.redis_keys.job(bad), "job", "{")
    await claim(queue)
    assert (await queue.dead_letters.page())[0][0].id == bad
    assert await queue.dead_letters.count() == 1
    assert await queue.dead_letters.redrive(bad)
    await claim(queue, worker="w2")
    assert await queue.dead_letters.purge(bad)
    assert await queue.jobs.get(good) is not None


@case("admit", "transact")
async def api_keys(queue: Queue, make: Make) -> None:
    _, key = await queue.api_keys.create("acme", frozenset())
    await queue.api_keys.identify(key.id, "default")
    await queue.api_keys.note_use(key.id)
    assert (await queue.api_keys.admit("acme", 2)).remaining == 1
    assert (await queue.api_keys.admit("acme", 2)).remaining == 0
    await queue.api_keys.set_limits("acme", TenantLimits(running_slots=1))
    assert (await queue.api_keys.tenant_limits())["acme"].running_slots == 1
    assert await queue.api_keys.revoke(key.id)


@case("transact")
async def batches(queue: Queue, make: Make) -> None:
    now = now_ms()
    life = {"created_at_ms": now, "expires_at_ms": now + 60_000}
    file = File(id="file-a", tenant="acme", filename="a", purpose="batch", bytes=1, **life)
    await queue.files.begin("acme", file.id, 1)
    await queue.files.put(file, [Part("p", 1)])
    for name in ("batch_a", "batch_b"):
        outputs = {"output_file_id": "file-o", "error_file_id": "file-e"}
        batch = Batch(
            id=name, tenant="acme", endpoint="/v1/jobs", input_file_id=file.id, base_url="", **outputs, **life
        )
        await queue.batches.create(batch)
    await queue.batches.cancel("acme", "batch_b")
    assert len(await queue.batches.due(10, {}, 1000)) == 1  # one of a tenant
    for name in ("batch_a", "batch_b"):
        batch = await queue.batches.get("acme", name)
        await queue.batches.postpone(batch.tenant, batch.id, 1000)
        assert await queue.batches.commit(batch, BatchUpdate({}, {"total": 1}, [0], [("file-o", Part("p", 1))]), 1000)
        batch = await queue.batches.get("acme", name)
        assert await queue.batches.commit(batch, BatchUpdate({"status": "completed"}), None)
    await queue.files.forget("acme", file.id)
    await queue.files.begin("acme", "file-c", 1)
    await queue.files.abandon("acme", "file-c")


@case("transact")
async def adapters(queue: Queue, make: Make) -> None:
    adapter = UploadedAdapter(
        id=new_id("adapter"), model="demo", name="ink", bytes=1, parts=1, sha256="", created_at_ms=now_ms()
    )
    await queue.adapters.begin("acme", adapter.id, 1, 1)
    await queue.adapters.put("acme", adapter)
    await put(queue, make(tenant="acme", adapters=(Adapter(id=adapter.id),)))
    with pytest.raises(Conflict):
        await queue.adapters.forget("acme", adapter.id)
    assert await end(queue, (await claim(queue))[0])
    await queue.maintenance.forget_item(await queue.adapters.forget("acme", adapter.id))


@case("transact")
async def pauses(queue: Queue, make: Make) -> None:
    await put(queue, make(tenant="acme"))
    for kind, name in ((PauseKind.TENANT, "acme"), (PauseKind.MODEL, "demo"), (PauseKind.ALL, "")):
        await queue.pauses.set(Pause(kind, name, "", 0))
        assert await claim(queue) == []
        await queue.client.scripts.list_as_waiting("w1", 60_000, "", True, "", "demo", 0)
        assert await queue.pauses.end(kind, name)


@case("transact")
async def model_orders(queue: Queue, make: Make) -> None:
    for action in (ModelAction.LOAD, ModelAction.PIN):
        await queue.model_orders.put(ModelOrder("one", "demo", action, 0))


@case("read_replies", "transact")
async def webhooks(queue: Queue, make: Make) -> None:
    endpoint = WebhookEndpoint(
        id="we_a", url="https://example.com/", states=(State.QUEUED,), secrets=SECRET, created_at_ms=now_ms()
    )
    await queue.webhooks.create_endpoint("default", endpoint)
    await queue.webhooks.change_endpoint("default", "we_a", lambda one: one.model_copy(update={"description": "b"}))
    await put(queue, make())
    await queue.webhooks.expand_outbox()
    (due,) = await queue.webhooks.claim_deliveries(10, 10, {}, 1000)
    outcome = AttemptOutcome(DeliveryState.PENDING, retry_s=60)
    assert await queue.webhooks.record_attempt(due.delivery.id, outcome, DeliveryAttempt(at_ms=now_ms(), status=500))
    await queue.webhooks.redeliver("default", due.delivery.id)
    await queue.webhooks.send_test("default", endpoint, "evt_1")
    await queue.webhooks.delete_endpoint("default", endpoint.id)


@case("transact")
async def sync_calls(queue: Queue, make: Make) -> None:
    call = ("acme", "d" * 40)
    await queue.sync_calls.start(*call, "job_a")
    await queue.sync_calls.leave(*call, "job_a")
    assert await queue.sync_calls.join(*call) == "job_a"
    score = await queue.sync_calls.leave(*call, "job_a")
    assert score == 1000
    assert await queue.sync_calls.join(call[0], "e" * 40) is None
    assert await queue.sync_calls.abandon(*call, "job_a", score)


@pytest.mark.every_redis
@pytest.mark.parametrize("name", CASES)
async def test_a_script_that_is_sent_again_changes_nothing(queue: Queue, make_submission: Make, name: str) -> None:
    repeater = Repeater(queue)
    build, scripts = CASES[name]
    await build(queue, make_submission)
    assert scripts <= repeater.seen


def test_every_script_is_sent_again() -> None:
    """A new script needs a case; the exceptions name scripts that exist."""
    covered = set().union(*(scripts for _, scripts in CASES.values()))
    assert covered == SCRIPTS
    assert {*REPLY_DIFFERS, *REPLAYED} <= SCRIPTS
    assert not REPLAYED & REPLY_DIFFERS.keys()
