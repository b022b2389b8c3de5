"""Random operations on a real queue, each compared with the model.

Every rule draws plain numbers and selects with them from what there is, so that an example replays whatever Redis did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import pytest
from harness.queue import check_keys, come_due, end_retention, lasting_names, lose, miss_deadline
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from integration.queue_model.checks import GROUP, KEPT, SUBSCRIBED, Checker
from integration.queue_model.model import QueueModel

from shared.artifact_ref import ArtifactRef
from shared.auth import TenantLimits
from shared.errors import Conflict, FusequeueError, IdempotencyMismatch, InvalidRequest, QueueFull
from shared.job import InputRef, Phase, State, Webhook
from shared.job_fields import OnDeadline, OnParentFailure, Priority
from shared.job_record import Artifact, Outcome, Progress
from shared.queue import Claim, Queue, Submission, SubmitResult
from shared.queue.checkpoints import JobCheckpoint, StoredImage, checkpoint_key
from shared.queue.maintenance.changes import JobUpdate
from shared.queue.order.position import QueueReason
from shared.queue.records import ProgressReport
from shared.runtime.clock import now_ms
from shared.tasks import Task
from shared.webhooks import WebhookEndpoint

T = TypeVar("T")
MODELS = ("demo", "other")
WORKERS = ("w1", "w2", "w3")
TENANTS = ("a", "b", "c")
PRIORITIES = tuple(Priority)
DRAIN_S = 20.0

index = st.integers(0, 999)
"""Selects one of any number of jobs or claims."""
worker = st.sampled_from(WORKERS)


class Spec(NamedTuple):
    """A job to be submitted."""

    tenant: str
    model: str
    width: int
    n: int
    priority: Priority
    window_ms: int
    key: str | None
    fingerprint: str
    parents: tuple[int, ...]
    extras: tuple[str, ...]


spec = st.builds(
    Spec,
    tenant=st.sampled_from(TENANTS),
    model=st.sampled_from(MODELS),
    width=st.sampled_from((64, 128)),
    n=st.sampled_from((1, 1, 1, 2, 4)),
    priority=st.sampled_from(PRIORITIES),
    window_ms=st.sampled_from((0, 0, 1)),
    key=st.sampled_from((None, None, None, "k1", "k2")),
    fingerprint=st.sampled_from(("x", "x", "y")),
    parents=st.tuples(st.integers(0, 999), st.integers(0, 999)),
    extras=st.sampled_from(
        (
            *((), ("webhook",), ("deadline",), ("deadline", "run"), ("image",), ("webhook", "deadline", "image")),
            *(("later",), ("later", "webhook", "deadline", "image"), ("after",), ("after", "after", "anyway")),
            *(("after", "deadline"), ("after", "later", "image"), ("after", "after"), ("after", "after", "anyway")),
            *(("source",), ("source", "deadline"), ("source", "after", "anyway"), ("source", "image", "later")),
        )
    ),
)


ARTIFACT = Artifact(index=0, key="jobs/x/1/0.png", content_type="image/png", bytes=9, width=64, height=64, seed=1)

OPERATIONS: list[st.SearchStrategy[tuple[str, dict[str, Any]]]] = []


def operation(weight: int = 1, **arguments: st.SearchStrategy[Any]) -> Callable[[T], T]:
    """Make a method an operation, drawn `weight` times as often as others.

    Not a rule of its own: hypothesis turns rules off for whole examples, and of the 2,400 steps of a short run 20 were
    claims.
    """

    def mark(method: T) -> T:
        OPERATIONS.extend([st.tuples(st.just(method.__name__), st.fixed_dictionaries(arguments))] * weight)  # type: ignore[attr-defined]
        return method

    return mark


class QueueMachine(RuleBasedStateMachine):
    """`make`: builds a submission; `queue`: of a new namespace; `run`: of the event loop."""

    def __init__(
        self, run: Callable[[Coroutine[Any, Any, Any]], Any], queue: Queue, make: Callable[..., Submission]
    ) -> None:
        super().__init__()
        self._run, self.queue, self.make = run, queue, make
        self.sound = False
        self.model = QueueModel()
        self.claims: list[tuple[str, Claim]] = []
        """All claims that were ever made, current or not, with their workers."""
        self.inputs = {tenant: _input(tenant) for tenant in TENANTS}
        self.checker = Checker(queue, self.model, self.inputs)
        self.run(self._prepare())

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        self.sound = False
        return self._run(call)

    async def _prepare(self) -> None:
        for tenant, ref in self.inputs.items():
            await self.queue.inputs.put(tenant, ref, 3600)
        for tenant, states in SUBSCRIBED.items():
            endpoint = WebhookEndpoint(
                id="we_1", url="https://hook.invalid/", states=states, secrets=(), created_at_ms=now_ms()
            )
            await self.queue.webhooks.create_endpoint(tenant, endpoint)

    # Submitting

    @initialize(specs=st.lists(spec, min_size=6, max_size=12))
    def start(self, specs: list[Spec]) -> None:
        """Begin with some jobs, most of them running."""
        self._submit([self._submission(one) for one in specs])
        for name in WORKERS:
            self.claim(name, 8, Priority.BULK, MODELS)

    @operation(4, specs=st.lists(spec, min_size=2, max_size=5))
    def submit(self, specs: list[Spec]) -> None:
        self._submit([self._submission(one) for one in specs])

    @operation(which=index)
    def submit_again(self, which: int) -> None:
        """Submit a job once more by its id, as a client's retry does."""
        if self.model.jobs:
            job_id, job = _select(self.model.jobs, which)
            if job.forgotten:
                self.claims = [one for one in self.claims if one[1].job.id != job_id]
            self._submit([job.submission])

    def _submit(self, submissions: list[Submission]) -> None:
        replies = self.run(self.queue.jobs.submit(submissions))
        for submission, reply in zip(submissions, replies, strict=True):
            kind, job_id = self.model.submit(submission)
            assert _kind(reply) == kind, (reply, kind)
            assert not job_id or kind == "mismatch" or reply.job_id == job_id

    def _submission(self, one: Spec) -> Submission:
        fields = {name: getattr(one, name) for name in ("tenant", "model", "width", "n", "priority", "window_ms")}
        fields["group"] = None if one.width == 64 else GROUP
        if "deadline" in one.extras:
            fields["time_limit_ms"] = 7_200_000 if one.fingerprint == "y" else 3_600_000
        if "later" in one.extras:
            fields["not_before_ms"] = now_ms() + 3_600_000
        if "after" in one.extras:
            fields["after"] = self._parents(one)
        if "anyway" in one.extras:
            fields["on_parent_failure"] = OnParentFailure.RUN
        if "run" in one.extras:
            fields["on_deadline"] = OnDeadline.RUN
        if "webhook" in one.extras:
            fields["webhook"] = Webhook(url="https://job.invalid/", states=(State.QUEUED, State.FAILED))
        if "image" in one.extras:
            fields |= {"images": (self.inputs[one.tenant],), "task": Task.IMAGE_TO_IMAGE}
        if "source" in one.extras and (sources := self._parents(one)):
            fields |= {"images": (*fields.get("images", ()), _artifact_of(sources[0])), "task": Task.IMAGE_TO_IMAGE}
        fingerprint = one.fingerprint if one.key else None
        return self.make(idempotency_key=one.key, fingerprint=fingerprint, **fields)

    def _parents(self, one: Spec) -> tuple[str, ...]:
        """Return jobs to wait for: running ones of the tenant if there are any, else queued ones, rarely any job."""
        running, queued = (
            [job_id for job_id, job in jobs.items() if job.tenant == one.tenant]
            for jobs in (self.model.running(), self.model.queued())
        )
        jobs = running + queued[: max(0, 2 - len(running))]
        if not jobs or one.parents[0] % 16 == 0:
            jobs = list(self.model.jobs)
        count = max(1, one.extras.count("after"))
        return tuple(dict.fromkeys(jobs[number % len(jobs)] for number in one.parents[:count])) if jobs else ()

    @operation(tenant=st.sampled_from(TENANTS), queued=st.sampled_from((None, 3)), slots=st.sampled_from((None, 1, 3)))
    def set_limits(self, tenant: str, queued: int | None, slots: int | None) -> None:
        self.run(self.queue.api_keys.set_limits(tenant, TenantLimits(queued_jobs=queued, running_slots=slots)))
        for limits, value in ((self.model.queued_limits, queued), (self.model.running_limits, slots)):
            limits.pop(tenant, None)
            if value is not None:
                limits[tenant] = value

    # Claiming

    @operation(
        5,
        worker=worker,
        slots=st.integers(1, 8),
        lowest=st.sampled_from(PRIORITIES),
        models=st.sampled_from((MODELS, MODELS[:1])),
    )
    def claim(self, worker: str, slots: int, lowest: Priority, models: tuple[str, ...]) -> None:
        others = any(job.worker == worker for job in self.model.running().values())
        claims = self.run(self.queue.claims.claim(worker, models, slots, min_priority=lowest, has_other_jobs=others))
        assert not any(one.must_run_solo for one in claims) or (len(claims) == 1 and not others)
        assert all(one.job.model in models for one in claims)
        self._claimed(worker, claims, slots, lowest)

    @operation(3, worker=worker, which=index, slots=st.integers(1, 8), lowest=st.sampled_from(PRIORITIES))
    def join(self, worker: str, which: int, slots: int, lowest: Priority) -> None:
        batch = {job_id: job for job_id, job in self.model.running().items() if job.worker == worker}
        if not batch or any(job.solo for job in batch.values()):
            return
        signature = _select(batch, which)[1].submission.signature
        claims = self.run(self.queue.claims.join(worker, signature, slots, models=MODELS, min_priority=lowest))
        assert all(one.signature == signature and not one.must_run_solo for one in claims)
        self._claimed(worker, claims, slots, lowest)

    def _claimed(self, worker: str, claims: list[Claim], slots: int, lowest: Priority) -> None:
        assert sum(one.job.slots for one in claims) <= slots
        assert len({one.signature for one in claims}) <= 1
        assert all(PRIORITIES.index(one.job.priority) <= PRIORITIES.index(lowest) for one in claims)
        running = self.model.count(self.model.running().values(), lambda job: job.tenant, slots=True)
        for tenant in TENANTS:
            claimed = [one.job.slots for one in claims if one.job.tenant == tenant]
            self.model.check_quota(tenant, running.get(tenant, 0), claimed)
        self.model.claim(claims, worker)
        self.claims += [(worker, one) for one in claims]
        self.run(self._note_expired())
        self.run(self._check_slack(claims))

    async def _check_slack(self, claims: list[Claim]) -> None:
        """Fail if a claim left a job with less slack in the same lane that needs no more slots."""
        claimed = {one.job.id: self.model.jobs[one.job.id] for one in claims if one.slack_ms is not None}
        waiting = self.model.queued()
        left = {job_id: job for job_id, job in waiting.items() if job.has_deadline and job.in_lane}
        jobs = {job_id: job for job_id, job in (claimed | left).items() if not (job.moved or job.late)}
        records = zip(jobs, await self.queue.jobs.get_many(list(jobs)), strict=True)
        deadlines = {job_id: 0 if record is None else record.deadline_at_ms or 0 for job_id, record in records}
        for job_id in jobs.keys() & claimed.keys():
            for other in jobs.keys() & left.keys():
                if jobs[other].lane == jobs[job_id].lane and jobs[other].slots <= jobs[job_id].slots:
                    assert deadlines[job_id] <= deadlines[other], f"{other} has less slack than {job_id}"

    async def _note_expired(self) -> None:
        """Claims may end jobs whose deadline has passed, and let those that run late lose their place."""
        late = [job_id for job_id, job in self.model.queued().items() if job.late]
        for job_id, record in zip(late, await self.queue.jobs.get_many(late), strict=True):
            if record is not None and record.state is State.EXPIRED:
                self.model.end(job_id, State.EXPIRED)
            elif not await self.queue.client.redis.hexists(self.queue.client.redis_keys.job(job_id), "start_by"):
                self.model.jobs[job_id].has_deadline = False

    # Running

    @operation(
        5,
        which=index,
        state=st.sampled_from((State.SUCCEEDED, State.SUCCEEDED, State.FAILED, State.CANCELED)),
        how=st.sampled_from(("running", "running", "any claim", "other worker", "earlier epoch")),
    )
    def settle(self, which: int, state: State, how: str) -> None:
        """Settle a claim, and again with the same and with another token."""
        running = self.model.running()
        if not running or how == "any claim":
            if self.claims:
                holder, one = self.claims[which % len(self.claims)]
                self._settle(holder, one.job.id, one.epoch, state)
            return
        job_id, job = _select(running, which)
        holder = "w9" if how == "other worker" else job.worker or ""
        self._settle(holder, job_id, job.epoch - (how == "earlier epoch"), state)

    def _settle(self, holder: str, job_id: str, epoch: int, state: State) -> None:
        outcome = Outcome(state=state, device_seconds=0.25, artifacts=(ARTIFACT,) if state is State.SUCCEEDED else ())
        for token in (f"{holder}-{epoch}", f"{holder}-{epoch}", f"{holder}-{epoch}-other"):
            settled = self.run(self.queue.claims.settle(holder, job_id, epoch, outcome, token=token))
            assert settled == self.model.settle(job_id, holder, epoch, state, token)
            if settled and self.model.untold:
                self.model.queue_due()

    @operation(
        4,
        worker=worker,
        which=st.lists(index, min_size=1, max_size=4),
        call=st.sampled_from(("renew", "report progress", "keep checkpoint", "release", "release")),
    )
    def hold(self, worker: str, which: list[int], call: str) -> None:
        """Renew, report, release or keep a checkpoint of some claims of a worker, current or not."""
        own = [one for holder, one in self.claims if holder == worker]
        chosen = [own[number % len(own)] for number in which] if own else []
        pairs = {one.job.id: one.epoch for one in chosen}
        current = {job_id for job_id, epoch in pairs.items() if self.model.jobs[job_id].holds(worker, epoch)}
        if call == "keep checkpoint":
            return self._keep_checkpoints(worker, chosen, len(which))
        {"renew": self._renew, "report progress": self._report, "release": self._release}[call](worker, pairs, current)

    def _keep_checkpoints(self, worker: str, claims: list[Claim], number: int) -> None:
        for one in claims:
            key = checkpoint_key(one.job.id, one.epoch, number, 0)
            image = StoredImage(key=key, bytes=100 * number, sha256="0" * 64, step=number, total=8)
            checkpoint = JobCheckpoint(images=(image, None, image)[:number])
            verdict = self.run(self.queue.claims.keep_checkpoint(worker, one, checkpoint))
            assert verdict == self.model.keep_checkpoint(one.job.id, worker, one.epoch, checkpoint)

    def _renew(self, worker: str, pairs: dict[str, int], current: set[str]) -> None:
        renewal = self.run(self.queue.claims.renew(worker, pairs))
        assert renewal.lost == pairs.keys() - current
        jobs = self.model.jobs
        assert renewal.cancel == {job_id for job_id in current if jobs[job_id].cancel}
        assert renewal.pause == {job_id for job_id in current if jobs[job_id].paused and not jobs[job_id].cancel}
        for job_id in current:
            self.model.jobs[job_id].lease_expired = False

    def _report(self, worker: str, pairs: dict[str, int], current: set[str]) -> None:
        reports = [
            ProgressReport(job_id, epoch, Phase.DENOISING, Progress(step=1, total=8)) for job_id, epoch in pairs.items()
        ]
        assert self.run(self.queue.claims.report_progress(*reports)) == len(current)
        for job_id in current:
            self.model.jobs[job_id].step = 1

    def _release(self, worker: str, pairs: dict[str, int], current: set[str]) -> None:
        assert self.run(self.queue.claims.release(worker, pairs)) == len(current)
        for job_id in pairs:
            if job_id in current:
                self.model.give_back(job_id, lost=False)

    # Workers that are lost, deadlines

    @operation(5, which=index, all_of_worker=st.booleans(), reclaim=st.sampled_from((True, True, False)))
    def lose(self, which: int, all_of_worker: bool, reclaim: bool) -> None:
        """Expire the lease of one running job, or of all jobs of its worker."""
        running = {job_id: job for job_id, job in self.model.running().items() if not job.lease_expired}
        if not running:
            return
        job_id, job = _select(running, which)
        lost = [one for one in running if running[one].worker == job.worker] if all_of_worker else [job_id]
        self.run(lose(self.queue, *lost))
        for one in lost:
            running[one].lease_expired = True
        if reclaim:
            self.reclaim()

    @operation()
    def reclaim(self) -> None:
        """Expired leases may have a grace period, so not every one must be reclaimed at once."""
        for job_id in self.run(self.queue.maintenance.reclaim()):
            assert self.model.jobs[job_id].lease_expired, f"{job_id} is reclaimed while its lease is current"
            self.model.give_back(job_id, lost=True)

    @operation(3, which=st.lists(index, max_size=3), queue=st.sampled_from((True, True, False)))
    def come_due(self, which: list[int], queue: bool) -> None:
        """Let jobs for later be due, and queue those that are; a paused one goes on waiting."""
        waiting = {job_id: job for job_id, job in self.model.queued().items() if job.waiting and not job.due}
        for job_id, job in [_select(waiting, number) for number in which] if waiting else []:
            self.run(come_due(self.queue, job_id))
            job.due = True
        if queue:
            assert self.run(self.queue.maintenance.queue_due()) == self.model.queue_due()

    @operation(which=index, expire=st.booleans())
    def pass_deadline(self, which: int, expire: bool) -> None:
        dated = {job_id: job for job_id, job in self.model.queued().items() if job.has_deadline and not job.waiting}
        waiting = {job_id: job for job_id, job in dated.items() if not job.late}
        if waiting:
            job_id, job = _select(waiting, which)
            self.run(miss_deadline(self.queue, job_id))
            job.late = True
        if expire:
            self.expire()

    def expire(self) -> None:
        late = {job_id: job for job_id, job in self.model.queued().items() if job.late and job.has_deadline}
        ended = [job_id for job_id, job in late.items() if not job.runs_late]
        assert self.run(self.queue.maintenance.expire()) == len(ended)
        for job_id, job in late.items():
            job.has_deadline = False
            if job_id in ended:
                self.model.end(job_id, State.EXPIRED)

    # Clients and operators

    @operation(3, which=index, among=st.sampled_from(("running", "queued", "all")))
    def cancel(self, which: int, among: str) -> None:
        jobs = {"running": self.model.running(), "queued": self.model.queued()}.get(among) or self.model.jobs
        if jobs:
            job_id, job = _select(jobs, which)
            record = self.run(self.queue.jobs.cancel(job_id))
            self.model.cancel(job_id)
            assert (record is None) == job.forgotten
            assert record is None or record.state == job.state

    @operation(4, which=index, among=st.sampled_from(("running", "queued", "all")), paused=st.booleans())
    def pause(self, which: int, among: str, paused: bool) -> None:
        """Pause or resume a job, twice: a repetition changes nothing."""
        jobs = {"running": self.model.running(), "queued": self.model.queued()}.get(among) or self.model.jobs
        if jobs:
            job_id, job = _select(jobs, which)
            self.model.pause(job_id, paused)
            for _ in range(2):
                record = self.run((self.queue.jobs.pause if paused else self.queue.jobs.resume)(job_id))
                assert (record is None) == job.forgotten
                assert record is None or record.state == job.state

    @operation(which=index)
    def end_pause(self, which: int) -> None:
        """Let the time of a pause end: the job expires."""
        paused = {job_id: job for job_id, job in self.model.queued().items() if job.paused}
        if paused:
            job_id, _ = _select(paused, which)
            redis, keys = self.queue.client.redis, self.queue.client.redis_keys
            self.run(redis.zadd(keys.paused, {job_id: 1}))
            ended = {job_id} | {
                one for one, job in self.model.queued().items() if job.late and job.has_deadline and not job.runs_late
            }
            assert self.run(self.queue.maintenance.expire()) == len(ended)
            for one in ended:
                self.model.end(one, State.EXPIRED)
            for job in self.model.queued().values():
                job.has_deadline = job.has_deadline and not job.late

    @operation(
        3,
        which=index,
        queued=st.sampled_from((True, True, False)),
        priority=st.sampled_from((None, *PRIORITIES)),
        time_limit_ms=st.sampled_from((None, 0, 3_600_000, 7_200_000)),
    )
    def update(self, which: int, queued: bool, priority: Priority | None, time_limit_ms: int | None) -> None:
        """Change a queued job, or try it with any."""
        jobs = self.model.queued() if queued else self.model.jobs
        if not jobs:
            return
        job_id, job = _select(jobs, which)
        (state,) = self.run(self.queue.changes.update([job_id], JobUpdate(priority, time_limit_ms)))
        assert state == (None if job.forgotten else job.state)
        if state is State.QUEUED:
            record = self.run(self.queue.jobs.get(job_id))
            assert record is not None
            before = job.submission.job
            expected = before.model_copy(update={"time_limit_ms": record.job.time_limit_ms})
            assert record.job == expected.model_copy(update={"priority": priority or before.priority})
            self.model.update(job_id, record.job, time_limit_ms)

    @operation(3, which=index, redrive=st.booleans())
    def treat_dead_letter(self, which: int, redrive: bool) -> None:
        """Redrive or purge a dead letter, or try it with a job that has ended and is none."""
        dead = {job_id: job for job_id, job in self.model.ended().items() if job.dead_letter}
        jobs = dead or self.model.ended()
        if jobs:
            job_id, job = _select(jobs, which)
            if redrive:
                assert self.run(self.queue.dead_letters.redrive(job_id)) == self.model.redrive(job_id)
            else:
                assert self.run(self.queue.dead_letters.purge(job_id)) == job.dead_letter
                _ = job.dead_letter and self.model.forget(job_id)

    @operation(which=index, by_retention=st.booleans())
    def forget(self, which: int, by_retention: bool) -> None:
        if self.model.jobs:
            job_id = _select(self.model.jobs, which)[0]
            if by_retention:
                self.run(end_retention(self.queue, job_id))
                _ = self.model.dependents(job_id) or self.model.forget(job_id)
            elif self.model.jobs[job_id].state.terminal and self.model.dependents(job_id):
                with pytest.raises(Conflict):
                    self.run(self.queue.jobs.forget(job_id))
            else:
                assert self.run(self.queue.jobs.forget(job_id)) == self.model.forget(job_id)

    @operation(which=index)
    def look(self, which: int) -> None:
        """Read a job's position, and repair what is in disagreement: nothing at any time."""
        if self.model.jobs:
            job_id, job = _select(self.model.jobs, which)
            position = self.run(self.queue.jobs.position(job_id))
            waiting = self.model.queued()
            assert (position is not None) == (job_id in waiting and not job.paused)
            same = [one for one in waiting.values() if one.submission.signature == job.submission.signature]
            if position is not None:
                assert (position.position is None) == (position.reason is QueueReason.WAITING) == job.waiting
                assert position.position is None or 0 <= position.position < len(same)
        assert self.run(self.queue.maintenance.reconcile()) == 0

    # Always, and in the end

    @rule(drawn=st.one_of(OPERATIONS))
    def operate(self, drawn: tuple[str, dict[str, Any]]) -> None:
        name, arguments = drawn
        getattr(self, name)(**arguments)

    @invariant()
    def agrees(self) -> None:
        self.run(self.checker.check())
        self.sound = True

    def teardown(self) -> None:
        if self.sound:  # otherwise a step has failed
            self.drain()
            self.forget_all()
        self.run(check_keys(self.queue))

    def drain(self) -> None:
        """Workers end all jobs: none is stuck."""
        for job_id, job in self.model.running().items():
            self._settle(job.worker or "", job_id, job.epoch, State.SUCCEEDED)
        for job_id, job in self.model.queued().items():
            if job.paused:
                self.run(self.queue.jobs.resume(job_id))
                self.model.pause(job_id, False)
        self.come_due(list(range(len(self.model.queued()))), True)
        self.expire()
        deadline = time.monotonic() + DRAIN_S
        while self.model.queued():
            assert time.monotonic() < deadline, f"stuck: {list(self.model.queued())}"
            self.come_due([], True)
            self.claim("drain", 8, Priority.BULK, MODELS)
            if not self.model.running():
                time.sleep(0.002)
            for job_id, job in self.model.running().items():
                self._settle("drain", job_id, job.epoch, State.SUCCEEDED)
        self.agrees()

    def forget_all(self) -> None:
        """Nothing is left of jobs that have ended and are forgotten."""
        for number, job_id in enumerate(self.model.ended()):
            if number % 2:
                self.forget(list(self.model.jobs).index(job_id), by_retention=False)
        self.run(end_retention(self.queue, *self.model.jobs))
        for job_id in self.model.ended():
            self.model.forget(job_id)
        self.agrees()
        left = self.run(lasting_names(self.queue)) - KEPT
        assert not left, f"left without a TTL: {left}"


def _select(jobs: dict[str, T], which: int) -> tuple[str, T]:
    return list(jobs.items())[which % len(jobs)]


def _kind(reply: SubmitResult | FusequeueError) -> str:
    if isinstance(reply, SubmitResult):
        return "replayed" if reply.replayed else "queued"
    return {IdempotencyMismatch: "mismatch", QueueFull: "full", InvalidRequest: "invalid"}[type(reply)]


def _artifact_of(job_id: str) -> InputRef:
    source = ArtifactRef(job=job_id)
    return InputRef(id="", key="", content_type="image/png", bytes=0, width=64, height=64, source=source)


def _input(tenant: str) -> InputRef:
    return InputRef(
        id=f"img-{tenant}",
        key=f"inputs/{tenant}/img-{tenant}/1",
        content_type="image/png",
        bytes=9,
        width=64,
        height=64,
    )
