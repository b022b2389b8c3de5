"""The order of the queue: which signature a worker claims, and which of its jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from shared.queue.order import deadlines, model_loads
from shared.queue.order.decision import Decision
from shared.queue.order.facts import (
    LaneFacts,
    LostJob,
    OrderFacts,
    QueuedJob,
    QueueFacts,
    SignatureFacts,
    SignatureQueue,
    TenantFacts,
)
from shared.queue.order.jobs import Batch, JobSelection
from shared.queue.order.joining import Joining
from shared.queue.order.policies import Limit, OrderPolicies, Reservation
from shared.queue.order.signatures import Part, Row, SignatureOrder, Step, most_ahead

NOW = 100_000
POLICIES = OrderPolicies(overdue_ms=2_000, aging_ms=30_000, bulk_share=0.1, interactive_allowance_s=10.0)
FREE = Limit(0, 0, paused=False)
FULL = Limit(4, 4, paused=False)


def facts(
    orders: Mapping[tuple[str, int], OrderFacts],
    *,
    due: Mapping[str, float] = {"demo": 0.0},
    preempted: Sequence[float] = (),
) -> QueueFacts:
    return QueueFacts(NOW, POLICIES, preempted, due, orders)


def order_facts(*tenants: TenantFacts, holders: int = 0, work_ms: float = 0.0) -> OrderFacts:
    ready = sorted((one.ready_ms, one.signature) for tenant in tenants for one in tenant.signatures)
    return OrderFacts(True, tenants, [(signature, at) for at, signature in ready], holders, work_ms)


def tenant(name: str, *signatures: str | SignatureFacts, usage: float = 0.0, limit: Limit = FREE) -> TenantFacts:
    rows = [SignatureFacts(one, NOW - 10, None, 0) if isinstance(one, str) else one for one in signatures]
    return TenantFacts(name, usage, limit, rows)


def candidates(
    orders: Mapping[tuple[str, int], OrderFacts],
    *,
    lowest: int = 2,
    load_ms: Mapping[str, int] | None = None,
    **more: Any,
) -> list[str]:
    load = load_ms or dict.fromkeys(more.get("due", {"demo": 0.0}), 0)
    return [row.signature for row, _ in SignatureOrder(facts(orders, **more), load, lowest).candidates()]


# ready = 1000, a load takes 200 and no other worker holds the model unless the row says otherwise; the last columns are
# the time that orders the signature among others, and the time from which an idle worker can claim it.
LOADS = [
    ("in memory: ordered by readiness", {"load_ms": 0}, 1000, 1000),
    ("to be loaded: three loads later; an idle worker claims it at once", {}, 1600, 1000),
    ("another worker has it: left to that worker for one load", {"holders": 1}, 2200, 1200),
    ("one load's worth of work is queued: still left to it", {"holders": 1, "work_ms": 200}, 2200, 1200),
    ("more work than a load: a second worker is worth it", {"holders": 1, "work_ms": 201}, 2200, 1000),
    ("two workers have it: no more than one load's worth each", {"holders": 2, "work_ms": 400}, 2200, 1200),
    ("in memory on this worker and on others", {"load_ms": 0, "holders": 3}, 1000, 1000),
]


@pytest.mark.parametrize(("why", "row", "sort_ms", "free_at"), LOADS, ids=[row[0] for row in LOADS])
def test_models_in_memory_go_first(why: str, row: dict[str, int], sort_ms: int, free_at: int) -> None:
    """Which signature a worker serves next, and when a model is worth loading."""
    load, holders, work = row.get("load_ms", 200), row.get("holders", 0), row.get("work_ms", 0)
    assert model_loads.sort_ms(1000, load, holders) == sort_ms, why
    assert model_loads.free_at(1000, load, holders, work) == free_at, why


def row(**changes: Any) -> Row:
    base = {"signature": "a", "model": "demo", "rank": 1, "ready_ms": 1000, "sort_ms": 1000, "free_ms": 1000}
    return Row(**{**base, "load_justified": True, "usage": 10, "own_rank": 1, **changes})


WITH_DEADLINE = {"turn": deadlines.DATED, "start_by": 5000}
ROWS = [
    ("the least-served tenant goes first, however long other jobs are ready", {}, {"usage": 11, "sort_ms": 0}),
    ("jobs of one tenant go by readiness", {}, {"sort_ms": 1001}),
    ("a model to be loaded goes later, even with less usage", {}, {"load_justified": False, "usage": 0}),
    ("a tenant's own jobs go by priority", {"own_rank": 0, "sort_ms": 99_999}, {}),
    ("a job with a deadline goes first, whenever its signature is ready", {**WITH_DEADLINE, "sort_ms": 99_999}, {}),
    ("but not before the model in memory", {}, {**WITH_DEADLINE, "load_justified": False}),
    ("nor before the least-served tenant", {}, {**WITH_DEADLINE, "usage": 11}),
    ("nor before a higher priority of its tenant", {}, {**WITH_DEADLINE, "own_rank": 2}),
    ("the least slack goes first", {**WITH_DEADLINE, "start_by": 4000, "sort_ms": 99_999}, WITH_DEADLINE),
    ("equal slacks go by readiness", {**WITH_DEADLINE, "sort_ms": 900}, WITH_DEADLINE),
    ("an aged job has its turn", {"turn": deadlines.OVERTAKEN}, WITH_DEADLINE),
    ("a job without a deadline goes later", WITH_DEADLINE, {"sort_ms": 0}),
    ("the order is total", {}, {"signature": "b"}),
]


@pytest.mark.parametrize(("why", "first", "second"), ROWS, ids=[row[0] for row in ROWS])
def test_order_of_ready_signatures(why: str, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Which of two signatures a worker claims."""
    assert row(**first).key < row(**second).key, why


TURNS = [
    ("a job with a deadline", {"start_by": 200_000}, deadlines.DATED),
    ("a job without one", {}, deadlines.UNDATED),
    ("an aged one that was not overtaken", {"aged": True}, deadlines.UNDATED),
    ("an aged one that was overtaken twice", {"aged": True, "overtaken": 2}, deadlines.UNDATED),
    ("an aged one that was overtaken three times", {"aged": True, "overtaken": 3}, deadlines.OVERTAKEN),
    ("one that is not aged any more", {"overtaken": 3}, deadlines.UNDATED),
]


@pytest.mark.parametrize(("why", "case", "turn"), TURNS, ids=[row[0] for row in TURNS])
def test_turns_of_jobs_with_and_without_deadlines(why: str, case: dict[str, Any], turn: int) -> None:
    assert deadlines.turn(**{"start_by": None, "overtaken": 0, "aged": False, **case}) == turn, why


STEPS = [
    ("bulk last", 2, {}, "0 ahead, 0 behind 1, 2"),
    (
        "bulk jobs that are due precede standard ones, of their model",
        2,
        {"demo": 1},
        "0 ahead, 2 of demo, 0 behind 1, 2",
    ),
    ("no bulk", 1, {"demo": 1}, "0 ahead, 0 behind 1"),
    ("only interactive jobs, which preempt others", 0, {}, "0 ahead"),
]


@pytest.mark.parametrize(("why", "lowest", "due", "steps"), STEPS, ids=[row[0] for row in STEPS])
def test_order_of_priorities(why: str, lowest: int, due: dict[str, float], steps: str) -> None:
    """Interactive jobs of tenants that are behind share a step with standard ones."""
    models = {"demo": 0.0, "other": 0.0} | due
    seen = []
    for step in SignatureOrder(facts({}, due=models), dict.fromkeys(models, 0), lowest).steps():
        parts = [f"{part.rank}{ {None: '', True: ' ahead', False: ' behind'}[part.ahead] }" for part in step.parts]
        seen.append(" ".join(parts) + ("" if len(step.models) == 2 else f" of {step.models[0]}"))
    assert ", ".join(seen) == steps, why


ALLOWANCES = [("no tenant is delayed", None, math.inf), ("it has used nothing", 0, 10), ("it has used 10 s", 10, 20)]


@pytest.mark.parametrize(("why", "least_s", "most_s"), ALLOWANCES, ids=[row[0] for row in ALLOWANCES])
def test_usage_up_to_which_a_tenant_is_ahead(why: str, least_s: float | None, most_s: float) -> None:
    """An allowance of ten GPU-seconds above the least-served one; usage is log2, 0 for none."""
    least = least_s and NOW / 300_000 + math.log2(least_s)
    found = most_ahead(least, 10.0, NOW)
    assert found == math.inf if most_s == math.inf else round(2 ** (found - NOW / 300_000), 6) == most_s, why


READY_LONG = SignatureFacts("old", NOW - 60_000, None, 0)
CHOICES = [
    ("nothing is queued", {}, {}, []),
    (
        "a signature that is not ready",
        {("demo", 1): order_facts(tenant("a", SignatureFacts("s", NOW + 1, None, 0)))},
        {},
        [],
    ),
    (
        "the least-served tenant first, then the others by readiness",
        {("demo", 1): order_facts(tenant("a", "s"), tenant("b", READY_LONG, usage=5.0))},
        {},
        ["s", "old"],
    ),
    (
        "interactive jobs before standard ones",
        {("demo", 1): order_facts(tenant("a", "standard")), ("demo", 0): order_facts(tenant("b", "fast"))},
        {},
        ["fast", "standard"],
    ),
    (
        "unless their tenant has used more than the allowance",
        {
            ("demo", 1): order_facts(tenant("a", "standard")),
            ("demo", 0): order_facts(tenant("b", "fast", usage=NOW / 300_000 + 4)),
        },
        {},
        ["standard", "fast"],
    ),
    (
        "a tenant without free slots is passed over, and its signature follows only by readiness",
        {("demo", 1): order_facts(tenant("full", "its", limit=FULL), tenant("a", "s", usage=5.0))},
        {},
        ["s", "its"],
    ),
    (
        "a model in memory before one to be loaded, whose jobs have waited less than three loads",
        {("demo", 1): order_facts(tenant("a", "s", usage=5.0)), ("big", 1): order_facts(tenant("b", "t"))},
        {"due": {"demo": 0.0, "big": 0.0}, "load_ms": {"demo": 0, "big": 20_000}},
        ["s", "t"],
    ),
    (
        "a model that other workers hold is left to them",
        {("big", 1): order_facts(tenant("b", "t"), holders=1)},
        {"due": {"big": 0.0}, "load_ms": {"big": 20_000}},
        [],
    ),
    (
        "bulk jobs that are due before standard ones",
        {("demo", 1): order_facts(tenant("a", "standard")), ("demo", 2): order_facts(tenant("a", "bulk"))},
        {"due": {"demo": 1.0}},
        ["bulk", "standard"],
    ),
]


@pytest.mark.parametrize(("why", "orders", "more", "expected"), CHOICES, ids=[row[0] for row in CHOICES])
def test_which_signatures_a_worker_tries(
    why: str, orders: dict[tuple[str, int], OrderFacts], more: dict[str, Any], expected: list[str]
) -> None:
    assert candidates(orders, **more) == expected, why


def test_an_overtaken_signature_is_counted() -> None:
    """Of the same tenant and priority, if its jobs have waited for the aging time."""
    dated = SignatureFacts("dated", NOW - 10, NOW + 5_000, 0)
    aged = SignatureFacts("aged", NOW - 30_000, None, 2)
    order = SignatureOrder(facts({("demo", 1): order_facts(tenant("a", dated, aged, "new"))}), {"demo": 0}, 2)
    row, rows = next(order.candidates())
    assert (row.signature, order.overtaken(row, rows)) == ("dated", [("aged", 1)])


def job(number: int, **changes: Any) -> QueuedJob:
    base = QueuedJob(f"j{number}", 0, "lane", 1, NOW - 100 + number, None, False, None, 0, "a", False)
    return base._replace(**changes)


def lane(
    name: str,
    stream: Sequence[QueuedJob],
    *,
    returned: Sequence[QueuedJob] = (),
    usage: float = 0.0,
    limit: Limit = FREE,
    rank: int = 1,
) -> LaneFacts:
    jobs = ([one._replace(tenant=name) for one in rows] for rows in (returned, stream))
    first, rest = jobs
    return LaneFacts(rank, name, usage, limit, None, first, False, rest)


def signature_queue(*lanes: LaneFacts, lost: Sequence[LostJob] = (), **changes: Any) -> SignatureQueue:
    jobs, slots = [0, 0, 0], [0, 0, 0]
    for one in lanes:
        for queued in (*one.returned, *one.stream):
            jobs[one.rank] += 1
            slots[one.rank] += queued.slots
    base = SignatureQueue(
        "s", "demo", NOW, 8, None, jobs, slots, [NOW - 10.0] * 3, [0] * 3, 0, 0.0, lanes, lost, has_more=False
    )
    return base._replace(**changes)


ALL = [Step((Part(1),), ("demo",))]


def select(queue: SignatureQueue, slots: int = 8, batch: Batch = Batch.ALONE) -> Decision:
    return JobSelection(queue, slots, 8, SignatureOrder(facts({}), {"demo": 0}, 2), batch).select(ALL)


def ids(rows: Sequence[tuple[Any, ...]]) -> str:
    return " ".join(row[0] for row in rows)


A = [job(number) for number in range(6)]
B = [job(number) for number in range(10, 16)]
DATED = job(20, place="dated", start_by=NOW + 5_000)
AGED = job(30, since_ms=NOW - 31_000)
JOBS: list[tuple[str, SignatureQueue, int, str]] = [
    ("by arrival, as many as there are slots", signature_queue(lane("a", A)), 3, "j0 j1 j2"),
    ("at most the largest batch of the model", signature_queue(lane("a", A), max_batch=2), 8, "j0 j1"),
    ("at most the efficient rows", signature_queue(lane("a", A), efficient_rows=4), 8, "j0 j1 j2 j3"),
    ("tenants share the slots", signature_queue(lane("a", A), lane("b", B, usage=1.0)), 4, "j0 j1 j10 j11"),
    ("the least-served one leads", signature_queue(lane("a", A, usage=2.0), lane("b", B, usage=1.0)), 3, "j10 j0 j11"),
    (
        "what one does not use goes to the other",
        signature_queue(lane("a", A[:1]), lane("b", B, usage=1.0)),
        4,
        "j0 j10 j11 j12",
    ),
    ("returned jobs before the stream", signature_queue(lane("a", A, returned=[job(9, place="front")])), 2, "j9 j0"),
    ("a job with a deadline before the stream", signature_queue(lane("a", A, returned=[DATED])), 2, "j20 j0"),
    (
        "but not before an aged one",
        signature_queue(lane("a", [AGED._replace(overtaken=3), *A], returned=[DATED])),
        2,
        "j30 j20",
    ),
    (
        "a limit ends a turn",
        signature_queue(lane("a", A, limit=Limit(3, 1, paused=False)), lane("b", B, usage=1.0)),
        8,
        "j0 j1 j10 j11 j12 j13 j14 j15",
    ),
    ("a paused tenant has none", signature_queue(lane("a", A, limit=Limit(0, 0, paused=True))), 8, ""),
    (
        "a job above its tenant's limit starts alone",
        signature_queue(lane("a", [job(0, slots=4), job(1)], limit=Limit(2, 0, paused=False))),
        8,
        "j0",
    ),
    (
        "a job that fits not is skipped",
        signature_queue(lane("a", [job(0, slots=4), job(1), job(2)]), max_batch=2),
        2,
        "j1 j2",
    ),
    (
        "a first job can be larger than the model's last batch",
        signature_queue(lane("a", [job(0, slots=4), job(1)]), max_batch=2),
        4,
        "j0",
    ),
    ("lost jobs run by themselves", signature_queue(lane("a", A, returned=[job(9, place="solo")])), 1, "j0"),
]


@pytest.mark.parametrize(("why", "queue", "slots", "expected"), JOBS, ids=[row[0] for row in JOBS])
def test_which_jobs_start_a_batch(why: str, queue: SignatureQueue, slots: int, expected: str) -> None:
    assert ids(select(queue, slots).take) == expected, why


def lost(number: int, *, slots: int = 1, since_ms: float = NOW - 10, rank: int = 1, usage: float = 0.0) -> LostJob:
    return LostJob(rank, "a", usage, FREE, job(number, place="solo", slots=slots, since_ms=since_ms))


LOST = [
    ("it goes first, by itself", [lost(9)], {}, "j9"),
    ("of the least-served tenant", [lost(8, usage=2.0), lost(9, usage=1.0)], {}, "j9"),
    ("not beside other jobs of its worker", [lost(9)], {"batch": Batch.BESIDE}, "j0 j1 j2 j3 j4 j5"),
    ("not into a running batch", [lost(9)], {"batch": Batch.RUNNING}, "j0 j1 j2 j3 j4 j5"),
]


@pytest.mark.parametrize(("why", "rows", "more", "expected"), LOST, ids=[row[0] for row in LOST])
def test_a_lost_job_runs_solo(why: str, rows: list[LostJob], more: dict[str, Any], expected: str) -> None:
    assert ids(select(signature_queue(lane("a", A), lost=rows), **more).take) == expected, why


LARGE = job(9, place="front", slots=4, passed_ms=NOW - 2_000)
WAITED_FOR = [
    ("skipped just now", {"passed_ms": NOW}, 1, False),
    ("overdue: slots of this worker will become free", {}, 1, True),
    ("overdue for long", {"passed_ms": NOW - 10_000_000}, 1, True),
    ("no slot of this worker will become free", {}, 0, False),
    ("it needs all slots of the worker", {"slots": 8}, 1, True),
    ("it needs more than the worker has", {"slots": 9}, 1, False),
    ("another worker waits for it", {"has_worker": True}, 1, False),
]


@pytest.mark.parametrize(("why", "changes", "claimed", "waits"), WAITED_FOR, ids=[row[0] for row in WAITED_FOR])
def test_slots_are_kept_free_for_an_overdue_large_job(
    why: str, changes: dict[str, Any], claimed: int, waits: bool
) -> None:
    queue = signature_queue(lane("a", A, returned=[LARGE._replace(**changes)]), claimed_jobs=claimed)
    decision = select(queue, 2, Batch.RUNNING)
    assert (ids(decision.take), ids(decision.wait_for)) == (("", "j9") if waits else ("j0 j1", "")), why
    assert not decision.skip, "it was skipped before"


TOO_LARGE = LARGE._replace(slots=9)
IN_PARTS = [
    ("skipped just now", TOO_LARGE._replace(passed_ms=NOW), Batch.ALONE, "j0 j1 j2 j3 j4 j5"),
    ("overdue: a worker without jobs runs it in parts", TOO_LARGE, Batch.ALONE, "j9"),
    ("not beside other jobs", TOO_LARGE, Batch.BESIDE, "j0 j1 j2 j3 j4 j5"),
    ("not in a running batch", TOO_LARGE, Batch.RUNNING, "j0 j1 j2 j3 j4 j5"),
]


@pytest.mark.parametrize(("why", "large", "batch", "expected"), IN_PARTS, ids=[row[0] for row in IN_PARTS])
def test_a_job_that_no_worker_has_slots_for_runs_in_parts(
    why: str, large: QueuedJob, batch: Batch, expected: str
) -> None:
    queue = signature_queue(lane("a", A, returned=[large]), claimed_jobs=0 if batch is Batch.ALONE else 1)
    assert ids(select(queue, 8, batch).take) == expected, why


BACKLOGS = [
    ("all can start beside those that run", Limit(4, 2, paused=False), 2, False),
    ("one has to wait", Limit(4, 2, paused=False), 3, True),
    ("no limit", Limit(0, 9, paused=False), 99, False),
    ("a pause", Limit(0, 0, paused=True), 1, True),
]


@pytest.mark.parametrize(("why", "limit", "jobs", "some"), BACKLOGS, ids=[row[0] for row in BACKLOGS])
def test_which_tenants_have_jobs_that_no_further_worker_could_start(
    why: str, limit: Limit, jobs: int, some: bool
) -> None:
    assert limit.holds_some_back(jobs) is some, why


AT_LIMIT = Limit(4, 3, paused=False)
RESERVED = AT_LIMIT._replace(reserved=Reservation("j9", 1, 4))
BY_LIMIT = [
    ("smaller jobs pass it, up to the limit", AT_LIMIT, [job(0, slots=4), *A[1:]], "j1", "j0", ""),
    ("it has been passed", AT_LIMIT, [job(0, slots=4, passed_ms=NOW - 1_999), *A[1:]], "j1", "", ""),
    ("it is overdue", AT_LIMIT, [job(0, slots=4, passed_ms=NOW - 2_000), *A[1:]], "", "", "j0"),
    ("it starts when nothing of its tenant runs", Limit(2, 0, paused=False), [job(0, slots=4)], "j0", "", ""),
    ("slots are kept for a job elsewhere", RESERVED, A, "", "", ""),
    ("and are free for it", RESERVED._replace(used=0), [*A, job(9, slots=4)], "", "", ""),
    ("as it leads its lane", RESERVED._replace(used=0), [job(9, slots=4)], "j9", "", ""),
]


@pytest.mark.parametrize(
    ("why", "limit", "jobs", "taken", "held_up", "waits"), BY_LIMIT, ids=[row[0] for row in BY_LIMIT]
)
def test_a_job_that_its_tenants_limit_holds_up_has_its_turn(
    why: str, limit: Limit, jobs: list[QueuedJob], taken: str, held_up: str, waits: str
) -> None:
    order = SignatureOrder(facts({}), {"demo": 0}, 2)
    selection = JobSelection(signature_queue(lane("a", jobs, limit=limit)), 8, 8, order, Batch.ALONE)
    decision = selection.select(ALL)
    reserved = " ".join(one.job_id for one in selection.blocked.values() if one.job_id)
    assert (ids(decision.take), ids(decision.held_up), reserved) == (taken, held_up, waits), why


@pytest.mark.parametrize(
    ("why", "tenants", "tried"),
    [
        ("one of its signatures", [tenant("a", "s", "t")], False),
        ("all of them, and another one", [tenant("a", "s")], True),
        ("none was read: it is not among the first tenants", [tenant("a")], False),
        ("it was not read", [tenant("b", "s")], False),
    ],
)
def test_a_tenant_has_no_slots_when_all_its_signatures_have_been_tried(
    why: str, tenants: list[TenantFacts], tried: bool
) -> None:
    order = SignatureOrder(facts({("demo", 1): order_facts(*tenants)}), {"demo": 0}, 2)
    assert order.has_tried("a", "demo", 1, ["s", "u"]) == tried, why
    assert not order.has_tried("a", "other", 1, ["s"])


def test_jobs_of_a_higher_priority_pass_one_that_slots_are_kept_for() -> None:
    steps = [Step((Part(0, ahead=True),), ("demo",)), *ALL]
    queue = signature_queue(lane("a", A, limit=RESERVED, rank=0), lane("a", B, limit=RESERVED))
    selection = JobSelection(queue, 8, 8, SignatureOrder(facts({}), {"demo": 0}, 2), Batch.ALONE)
    assert ids(selection.select(steps).take) == "j0"


def test_a_job_that_needs_more_slots_is_skipped() -> None:
    """It leads its tenant's jobs in the next batch, when slots are kept for it."""
    decision = select(signature_queue(lane("a", [job(0, slots=4), job(1)])), 2, Batch.RUNNING)
    assert (ids(decision.skip), ids(decision.take)) == ("j0", "j1")


def test_jobs_that_lose_their_place_are_removed() -> None:
    rows = [DATED._replace(loses_place=True), job(21, place="dated", start_by=1, loses_place=True)]
    decision = select(signature_queue(lane("a", [job(22, loses_place=True), *A], returned=rows)), 1)
    assert (ids(decision.remove), ids(decision.take)) == ("j20 j21 j22", "j0")


@pytest.mark.parametrize(("loses", "expected"), [(False, "j0 j1"), (True, "")])
def test_jobs_of_the_stream_follow_when_the_returned_ones_are_known(loses: bool, expected: str) -> None:
    """However many that do not fit are first; where all that were read are late, more that are not can be behind."""
    returned = [job(number, place="dated", slots=4, start_by=NOW, loses_place=loses) for number in range(40, 49)]
    one = lane("a", A, returned=returned)._replace(has_more_returned=True)
    assert ids(select(signature_queue(one), 2, Batch.RUNNING).take) == expected


def test_a_job_that_a_deadline_overtakes_is_counted_once_for_each() -> None:
    rows = [DATED, DATED._replace(id="j21")]
    decision = select(signature_queue(lane("a", [AGED], returned=rows)), 2)
    assert (ids(decision.take), decision.overtaken_jobs) == ("j20 j21", ["j30", "j30"])


def joining(
    orders: Mapping[tuple[str, int], OrderFacts], queue: SignatureQueue, *, lowest: int = 2, **more: Any
) -> tuple[str, bool]:
    """Return the ranks whose jobs can join, and whether others are held back."""
    order = SignatureOrder(facts(orders, **more), {"demo": 0}, lowest)
    steps, held_back = Joining(order, queue).allowed_steps()
    return " ".join(str(part.rank) for step in steps for part in step.parts), held_back


OWN = SignatureFacts("s", NOW - 10, None, 0)
OVERDUE = SignatureFacts("other", NOW - 2_000, None, 0)
QUEUED = signature_queue(lane("a", A))
JOINS: list[tuple[str, Sequence[TenantFacts], str, bool]] = [
    ("nothing else is queued", [tenant("a", OWN)], "0 0 1 2", False),
    ("another signature is ready", [tenant("a", OWN, "other")], "0 0 1 2", False),
    ("another one is overdue, and is next", [tenant("a", OWN, OVERDUE)], "0", True),
    (
        "another one is overdue, of a tenant that is served more",
        [tenant("a", OWN), tenant("b", OVERDUE, usage=5.0)],
        "0 0 1 2",
        False,
    ),
    (
        "a job of another signature must start before this batch can end",
        [tenant("a", OWN, SignatureFacts("other", NOW - 1, NOW + 500, 0))],
        "0",
        True,
    ),
]


@pytest.mark.parametrize(("why", "tenants", "ranks", "held"), JOINS, ids=[row[0] for row in JOINS])
def test_which_jobs_join_a_running_batch(why: str, tenants: Sequence[TenantFacts], ranks: str, held: bool) -> None:
    queue = QUEUED._replace(run_ms=1_000.0)
    assert joining({("demo", 1): order_facts(*tenants)}, queue) == (ranks, held), why


def test_bulk_gets_its_share_of_the_sum() -> None:
    """Nine slots above bulk are due one of bulk at a share of a tenth, shared by the models with ready bulk jobs."""
    order = SignatureOrder(facts({("demo", 2): order_facts(tenant("a", "bulk"))}), {"demo": 0}, 2)
    assert order.bulk_models() == ["demo"]
    assert round(9 * order.bulk_growth(1), 9) == 1.0


READY = [
    ("nothing is queued", {}, {}, None),
    ("jobs are ready", {("demo", 1): order_facts(tenant("a", "s"))}, {}, 0.0),
    ("later", {("demo", 1): order_facts(tenant("a", SignatureFacts("s", NOW + 70, None, 0)))}, {}, 70.0),
    ("not of a lower priority", {("demo", 2): order_facts(tenant("a", "s"))}, {"lowest": 1}, None),
    ("not of tenants without free slots", {("demo", 1): OrderFacts(False, [], [("s", NOW - 1.0)], 0, 0.0)}, {}, None),
]


@pytest.mark.parametrize(("why", "orders", "more", "expected"), READY, ids=[row[0] for row in READY])
def test_when_jobs_are_ready_for_a_worker(
    why: str, orders: dict[tuple[str, int], OrderFacts], more: dict[str, int], expected: float | None
) -> None:
    assert SignatureOrder(facts(orders), {"demo": 0}, more.get("lowest", 2)).next_ready_ms() == expected, why
