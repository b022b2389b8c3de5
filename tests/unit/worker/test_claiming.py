"""What a worker asks the queue for: each table row gives its reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from shared.job import Job
from shared.job_fields import Priority
from shared.queue import UnavailableModel, WorkerInfo
from shared.queue.workers.wakeups import WaitingList
from worker.claims import claiming
from worker.claims.claim_policy import (
    HINT_TTL_S,
    MAX_LOAD_S,
    UNKNOWN_LOAD_S,
    ClaimRequest,
    InteractiveHint,
    Listing,
    RunningJob,
    Wait,
    claim_requests,
    emptied_signature,
    likely_requests,
    load_times_ms,
    longest_pause_s,
    preempted_tenants,
    running_signature,
)
from worker.claims.claiming import ClaimLoop
from worker.engine.engine_status import LoadFailure
from worker.model_availability import claimable_models, models_only_here

BULK, INTERACTIVE = Priority.BULK, Priority.INTERACTIVE
BOTH = {"demo": 0, "other": 5}


def bulk(slots: int = 1, signature: str = "a") -> RunningJob:
    return RunningJob(signature, slots)


def interactive(slots: int = 1, signature: str = "a") -> RunningJob:
    return RunningJob(signature, slots, interactive=True)


@pytest.mark.parametrize(
    ("running", "min_priority", "tenants", "why"),
    [
        ([("a", BULK), ("b", Priority.STANDARD)], INTERACTIVE, {"a", "b"}, "all that interactive jobs delay"),
        ([("a", INTERACTIVE), ("b", BULK)], INTERACTIVE, {"b"}, "interactive jobs are not preempted"),
        ([("a", BULK)], BULK, set(), "jobs for free slots delay no other"),
        ([], INTERACTIVE, set(), "nothing runs"),
    ],
)
def test_tenants_that_are_preempted(
    make_job: Callable[..., Job],
    running: list[tuple[str, Priority]],
    min_priority: Priority,
    tenants: set[str],
    why: str,
) -> None:
    """The queue compares their GPU usage with that of the tenant of the claimed jobs."""
    jobs = [make_job(tenant=tenant, priority=priority) for tenant, priority in running]
    assert preempted_tenants(jobs, min_priority) == tenants, why


@pytest.mark.parametrize(
    ("running", "max_preempted", "requests", "why"),
    [
        ([], 8, [ClaimRequest(None, 16, BULK)], "an idle worker starts a ready batch of up to the largest size"),
        (
            [bulk(5)],
            8,
            [ClaimRequest("a", 3, BULK), ClaimRequest("a", 8, INTERACTIVE), ClaimRequest(None, 16, INTERACTIVE)],
            "free slots are for all priorities; interactive jobs can preempt the running rows",
        ),
        (
            [bulk(8)],
            8,
            [ClaimRequest("a", 8, INTERACTIVE), ClaimRequest(None, 16, INTERACTIVE)],
            "a full worker still takes interactive jobs of any signature",
        ),
        ([bulk(8)], 3, [ClaimRequest("a", 3, INTERACTIVE)], "another signature would preempt all rows, three may be"),
        ([bulk(8)], 0, [], "without preemption a full worker is full"),
        ([bulk(8), interactive(3)], 8, [ClaimRequest("a", 5, INTERACTIVE)], "until interactive jobs fill the forward"),
        ([bulk(8), interactive(8)], 8, [], "further interactive jobs are left to other workers"),
        (
            [bulk(8), interactive(2, "b")],
            8,
            [ClaimRequest("b", 6, INTERACTIVE)],
            "while rows are preempted, the running signature takes no bulk jobs, and a third signature waits",
        ),
        ([bulk(8), interactive(8, "b")], 8, [], "at most one forward of the running signature"),
        (
            [bulk(4), interactive(1, "b")],
            2,
            [ClaimRequest("b", 7, INTERACTIVE)],
            "free slots of the running signature preempt no further rows",
        ),
        (
            [interactive(3)],
            8,
            [ClaimRequest("a", 5, BULK), ClaimRequest("a", 5, INTERACTIVE)],
            "other jobs can join interactive ones",
        ),
    ],
)
def test_claim_requests(running: list[RunningJob], max_preempted: int, requests: list[ClaimRequest], why: str) -> None:
    """Eight slots of the running signature fit into a forward, sixteen of another one might."""
    assert claim_requests(running, batch_slots=8, max_batch=16, max_preempted=max_preempted) == requests, why


OWN, OWN_INTERACTIVE, OTHER = (
    ClaimRequest("a", 3),
    ClaimRequest("a", 8, INTERACTIVE),
    ClaimRequest(None, 16, INTERACTIVE),
)


@pytest.mark.parametrize(
    ("wanted", "has_interactive", "emptied", "requests", "why"),
    [
        ([OWN, OWN_INTERACTIVE, OTHER], True, None, [OWN, OWN_INTERACTIVE, OTHER], "all can return jobs"),
        ([OWN, OWN_INTERACTIVE, OTHER], False, None, [OWN], "no interactive job is queued"),
        ([OWN, OWN_INTERACTIVE, OTHER], True, "a", [OWN_INTERACTIVE, OTHER], "preempting jobs may use more slots"),
        ([OWN, OTHER], False, "b", [OWN], "another signature had no more jobs"),
        ([ClaimRequest(None, 16)], False, None, [ClaimRequest(None, 16)], "an idle worker"),
    ],
)
def test_requests_that_can_return_jobs(
    wanted: list[ClaimRequest], has_interactive: bool, emptied: str | None, requests: list[ClaimRequest], why: str
) -> None:
    assert likely_requests(wanted, interactive=has_interactive, emptied=emptied) == requests, why


@pytest.mark.parametrize(
    ("request_", "claimed_slots", "emptied"),
    [
        (OWN, [1, 1], "a"),
        (OWN, [1, 2], None),  # more jobs can be queued
        (OWN_INTERACTIVE, [1], None),  # standard jobs can be queued
        (ClaimRequest(None, 16), [1], None),  # a new batch is limited to the efficient rows
    ],
)
def test_signature_of_which_a_join_leaves_no_job_that_fits(
    request_: ClaimRequest, claimed_slots: list[int], emptied: str | None
) -> None:
    assert emptied_signature(request_, claimed_slots) == emptied


def test_running_signature_is_that_of_the_first_interactive_job() -> None:
    """As in the engine: priority, then age."""
    assert running_signature([bulk(8, "a"), interactive(1, "b"), interactive(1, "c")]) == "b"
    assert running_signature([bulk(8, "a"), bulk(1, "b")]) == "a"


@pytest.mark.parametrize("max_preempted", [0, 3, 8, 100])
def test_preempted_rows_stay_within_their_limit(max_preempted: int) -> None:
    """Claiming all that is requested, repeatedly, neither preempts more rows nor fills two forwards."""
    running = [bulk(8)]
    while requests := claim_requests(running, batch_slots=8, max_batch=8, max_preempted=max_preempted):
        request = requests[0]
        running.append(RunningJob(request.signature or "b", request.slots, request.min_priority is INTERACTIVE))
        together = sum(job.slots for job in running if job.signature == running_signature(running))
        preempted = sum(job.slots for job in running) - min(8, together)
        assert preempted <= max_preempted
    assert sum(job.slots for job in running if job.interactive) <= 8


@pytest.mark.parametrize(
    ("loaded", "measured_s", "expected", "why"),
    [
        ((), {}, {"a": 1000 * UNKNOWN_LOAD_S, "b": 1000 * UNKNOWN_LOAD_S}, "nothing was loaded before: a guess"),
        (("a",), {"a": 4.0}, {"a": 0, "b": 4000}, "a loaded model; the other counts as the measured mean"),
        ((), {"a": 4.0, "b": 0.5}, {"a": 4000, "b": 500}, "both were evicted: as measured"),
        ((), {"a": 1e4, "b": 1e-9}, {"a": 1000 * MAX_LOAD_S, "b": 1}, "bounded; 0 would mean loaded"),
    ],
)
def test_load_times(
    loaded: tuple[str, ...], measured_s: dict[str, float], expected: dict[str, float], why: str
) -> None:
    assert load_times_ms(("a", "b"), loaded, measured_s) == expected, why


def test_load_time_of_a_failed_model_is_negative_unless_it_is_loaded() -> None:
    times = load_times_ms(("a", "b", "c"), ("b",), {"a": 4.0}, failed=("a", "b"))
    assert times == {"a": -60000, "b": 0, "c": 4000}


def test_hint_is_likely_until_cleared_and_again_when_set_or_expired() -> None:
    now = [100.0]
    hint = InteractiveHint(lambda: now[0])
    assert hint.likely
    hint.clear(hint.count)
    assert not hint.likely
    hint.set()
    assert hint.likely
    hint.clear(hint.count)
    now[0] += HINT_TTL_S
    assert hint.likely


def test_clearing_ignores_a_response_from_before_the_newest_hint() -> None:
    """The job behind the hint may have been queued after the queue was read."""
    hint = InteractiveHint(lambda: 100.0)
    seen = hint.count
    hint.set()
    hint.clear(seen)
    assert hint.likely


@pytest.mark.parametrize(
    ("ready_in_ms", "waiting", "fruitless", "pause_s", "why"),
    [
        (
            None,
            1,
            0,
            2.0,
            "some changes send no wake-up, such as a model that can be loaded again",
        ),
        (None, 30, 0, 15.0, "30 workers together try twice a second"),
        (None, 1000, 0, 30.0, "bounded for any fleet"),
        (300, 1, 0, 0.3, "jobs become ready"),
        (300, 30, 7, 0.3, "the backoff is for jobs that are ready"),
        (60_000, 1, 0, 2.0, "jobs can become ready earlier than expected"),
        (0, 1, 0, 0.05, "another worker was faster"),
        (0, 1, 3, 0.4, "the pauses double"),
        (0, 1, 5000, 1.0, "up to a second"),
        (0, 30, 0, 1.5, "each of 30 workers begins with a longer pause"),
        (0, 30, 9, 15.0, "all 30 together try a job that none can run twice a second"),
    ],
)
def test_pause_after_a_fruitless_attempt(
    ready_in_ms: int | None, waiting: int, fruitless: int, pause_s: float, why: str
) -> None:
    assert longest_pause_s(ready_in_ms, waiting, fruitless) == pytest.approx(pause_s), why


@pytest.mark.parametrize(
    ("failures", "only_here", "claimed", "why"),
    [
        ({}, set(), ["a", "b"], "all can be loaded"),
        ({"a": False}, {"a", "b"}, ["b"], "the load of a is repeated: its jobs wait"),
        ({"a": True}, set(), ["b"], "another worker may serve a, or that is not known yet"),
        ({"a": True}, {"a"}, ["a", "b"], "a can be loaded nowhere: its jobs are to fail"),
        ({"a": True, "b": False}, {"a", "b"}, ["a"], "each model by itself"),
    ],
)
def test_models_that_are_claimed(failures: dict[str, bool], only_here: set[str], claimed: list[str], why: str) -> None:
    failed = {model: LoadFailure("no files", permanent, 0.0) for model, permanent in failures.items()}
    assert claimable_models(["a", "b"], failed, only_here) == claimed, why


def test_a_model_is_served_by_others_that_may_load_it() -> None:
    """Not by this worker itself, one that drains, or one that has refused it as well."""
    refused, postponed = (UnavailableModel("no files", permanent, 1.0) for permanent in (True, False))
    workers = [
        WorkerInfo("me", ("a", "b", "c", "d", "e")),
        WorkerInfo("w2", ("b",), "starting"),
        WorkerInfo("w3", ("c",), "draining"),
        WorkerInfo("w4", ("d", "e"), "unavailable", unavailable={"d": refused, "e": postponed}),
    ]
    assert models_only_here("abcde", workers, "me") == {"a", "c", "d"}


LISTED = Listing("a", False, ("demo",))


@pytest.mark.parametrize(
    ("listing", "wakeups", "now_s", "left_s"),
    [
        (LISTED, 3, 10.0, 2.0),  # a slot became free, and nothing is queued
        (LISTED, 3, 13.0, 0.0),  # the pause is over
        (LISTED, 4, 10.0, 0.0),  # a job was queued
        (Listing(None, False, ("demo",)), 3, 10.0, 0.0),  # all slots are in use
        (Listing("b", False, ("demo",)), 3, 10.0, 0.0),  # another signature runs
        (Listing(None, True, ("demo",)), 3, 10.0, 0.0),  # idle
        (Listing("a", False, ("demo", "other")), 3, 10.0, 0.0),  # a model was loaded
    ],
)
def test_a_pause_goes_on_while_the_worker_waits_for_the_same_and_nothing_was_queued(listing, wakeups, now_s, left_s):
    assert Wait(LISTED, wakeups=3, until_s=12.0).left_s(listing, wakeups, now_s) == left_s


@pytest.fixture
def claims() -> Any:
    """A queue that has no jobs; `next_ready_ms` says what is queued."""
    return Mock(
        join=AsyncMock(return_value=[]),
        next_ready_ms=AsyncMock(return_value=None),
    )


@pytest.fixture
def wakeups() -> Any:
    """A list of waiting workers with this one alone."""
    return Mock(list_as_waiting=AsyncMock(return_value=WaitingList(1, False, False, ())))


@pytest.fixture
def loop(claims: Any, wakeups: Any, monkeypatch: pytest.MonkeyPatch) -> ClaimLoop:
    """The loop of a worker that preempts jobs of another signature, with slots for interactive jobs of `a`."""
    engine = Mock(status=lambda: SimpleNamespace(loaded_models=("demo",), awaits_jobs=False))
    catalog = [SimpleNamespace(max_batch=8)]
    availability = Mock(retiring=frozenset())
    queue = Mock(claims=claims, wakeups=wakeups)
    loop = ClaimLoop("w", queue, engine, availability, catalog, Mock(), {}, Mock(), Mock(), Mock(), Mock())  # type: ignore[arg-type]
    monkeypatch.setattr(loop, "_requests", lambda: [ClaimRequest("a", 3, Priority.INTERACTIVE)])
    monkeypatch.setattr(claiming.ClaimLoop, "_load_times", lambda _: {"demo": 0})
    return loop


@pytest.mark.parametrize(("interactive_in_ms", "attempts"), [(None, 1), (0, 2)])
async def test_free_slots_lead_to_a_request_only_while_jobs_are_queued(
    loop: ClaimLoop, claims: Any, interactive_in_ms: int | None, attempts: int
) -> None:
    """A queued job of several images can fit into the slots that have become free."""
    claims.next_ready_ms.return_value = interactive_in_ms
    await loop._claim()
    await loop._claim()
    assert claims.join.await_count == attempts


async def test_an_interactive_job_that_is_queued_during_an_attempt_is_claimed_at_once(
    loop: ClaimLoop, claims: Any, wakeups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt does not look for interactive jobs, as there were none a moment ago; then a wake-up comes."""
    interactive = ClaimRequest("a", 3, Priority.INTERACTIVE)
    monkeypatch.setattr(loop, "_requests", lambda: [ClaimRequest("a", 1), interactive])
    loop._hint.clear(loop._hint.count)

    async def wake(*_: object, **__: object) -> list[object]:
        loop._wakeups += 1
        wakeups.list_as_waiting.return_value = WaitingList(1, False, True, ())
        return []

    claims.join.side_effect = wake
    await loop._claim()
    claims.join.side_effect = None
    await loop._claim()
    assert claims.join.await_args.kwargs["min_priority"] is Priority.INTERACTIVE


async def test_an_interactive_job_that_woke_no_worker_is_claimed_at_once(
    loop: ClaimLoop, claims: Any, wakeups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was queued after a claim, before the worker was listed again."""
    interactive = ClaimRequest("a", 3, Priority.INTERACTIVE)
    monkeypatch.setattr(loop, "_requests", lambda: [ClaimRequest("a", 1), interactive])
    loop._hint.clear(loop._hint.count)
    wakeups.list_as_waiting.return_value = WaitingList(1, False, True, ())
    _, pause_s = await loop._claim()
    assert await loop._pause(pause_s), "the pause ends at once"
    await loop._claim()
    assert claims.join.await_args.kwargs["min_priority"] is Priority.INTERACTIVE


async def test_a_join_that_leaves_slots_free_is_not_repeated_unless_jobs_are_queued(
    loop: ClaimLoop, claims: Any, wakeups: Any, make_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_requests", lambda: [ClaimRequest("a", 3)])
    claims.join.return_value = [SimpleNamespace(job=make_job())]
    await loop._claim()
    claims.join.return_value = []
    wakeups.list_as_waiting.return_value = WaitingList(1, True, False, ())
    _, pause_s = await loop._claim()
    assert claims.join.await_count == 1
    assert await loop._pause(pause_s), "a job was queued after the join: the pause ends at once"
    loop._pause_ended.clear()
    _, pause_s = await loop._claim()
    assert claims.join.await_count == 2
    assert not await loop._pause(pause_s), "the job needs more slots: the worker pauses"


async def test_the_worker_that_was_woken_claims_an_interactive_job_when_it_is_ready(
    loop: ClaimLoop, claims: Any, wakeups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other workers try later; it has passed its wake-up on before it looked for interactive jobs."""
    monkeypatch.setattr(loop, "_requests", lambda: [ClaimRequest(None, 8, Priority.INTERACTIVE)])
    loop._hint.clear(loop._hint.count)
    loop._unused_wakeups = ["0 b"]
    claims.claim = AsyncMock(return_value=[])
    wakeups.list_as_waiting.return_value = WaitingList(5, False, True, ())
    claims.next_ready_ms.return_value = 300
    await loop._claim()
    loop._unused_wakeups.clear()
    assert await loop._claim() == ([], 0.3)
    _, later_s = await loop._claim()
    assert later_s != 0.3


@pytest.mark.parametrize(("found", "asked"), [([], [{"other": 5}, BOTH]), (["a claim"], [{"other": 5}])])
async def test_after_a_batch_was_put_aside_jobs_of_other_models_are_claimed_first_once(
    loop: ClaimLoop, claims: Any, monkeypatch: pytest.MonkeyPatch, found: list[str], asked: list[dict[str, int]]
) -> None:
    """Its own jobs can be queued again by then, and go first by their age or tenant."""
    monkeypatch.setattr(claiming.ClaimLoop, "_load_times", lambda _: BOTH)
    monkeypatch.setattr(loop, "_requests", lambda: [ClaimRequest(None, 8)])
    claims.claim = AsyncMock(side_effect=[found, []])
    loop.put_aside([Mock(job=Mock(model="demo"))])
    await loop._send(ClaimRequest(None, 8))
    assert [call.args[1] for call in claims.claim.await_args_list] == asked
    claims.claim = AsyncMock(return_value=[])
    await loop._send(ClaimRequest(None, 8))
    claims.claim.assert_awaited_once_with("w", BOTH, 8)


async def test_nothing_is_claimed_until_the_engine_has_ended_a_batch_that_is_put_aside(claims: Any) -> None:
    engine = Mock(status=lambda: SimpleNamespace(loaded_models=("demo",), awaits_jobs=False))
    settings, uploader = Mock(max_preempted_rows=8), Mock(full=False)
    queue = Mock(claims=claims)
    loop = ClaimLoop("w", queue, engine, Mock(), [Mock(max_batch=8)], settings, {}, uploader, Mock(), Mock(), Mock())
    ended = asyncio.Event()
    put_aside = Mock(has_checkpoints=True, engine_done=Mock(done=ended.is_set))
    loop.put_aside([put_aside])
    assert loop._requests() == []
    put_aside.has_checkpoints = False  # it can have none after all, and runs on
    assert loop._requests() == [ClaimRequest(None, 8)]
    put_aside.has_checkpoints = True
    ended.set()
    assert loop._requests() == [ClaimRequest(None, 8)]
