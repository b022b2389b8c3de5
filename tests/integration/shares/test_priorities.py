"""Priorities order a tenant's own jobs; between tenants interactive jobs precede others within an allowance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness.queue import MODELS, a_moment, claim, end, put, state_of

from shared.job import State
from shared.job_fields import Priority
from shared.queue import Claim, Queue, Submission

Make = Callable[..., Submission]
INTERACTIVE, STANDARD, BULK = Priority
JOB_S = 0.5
SLOTS = 8
ALLOWANCE_S = 10.0
"""The default of FUSEQUEUE_INTERACTIVE_ALLOWANCE_S."""

MOST_BATCHES = int(ALLOWANCE_S / (JOB_S * SLOTS)) + 2
"""Batches of eight jobs that use up the allowance, one that exceeds it, and that of the other tenant."""


async def learn_cost(queue: Queue, make: Make, tenant: str = "operator", **fields: object) -> None:
    """Let the queue learn what a slot costs; before, it is charged with a second."""
    await put(queue, make(tenant=tenant, **fields))
    for one in await claim(queue, 1):
        assert await end(queue, one, device_seconds=JOB_S)


async def run_batch(queue: Queue, slots: int = SLOTS) -> list[Claim]:
    claims = await claim(queue, slots)
    for one in claims:
        assert await end(queue, one, device_seconds=JOB_S)
    return claims


async def batches_until_started(queue: Queue, make: Make, job_id: str, most: int = 40, **supply: object) -> int:
    """Return how many batches start until `job_id` does, while 40 interactive jobs of tenant `a` are always queued."""
    for batches in range(1, most + 1):
        await put(queue, *[make(tenant="a", priority=INTERACTIVE, **supply) for _ in range(SLOTS)])
        if job_id in {one.job.id for one in await run_batch(queue)}:
            return batches
    return most + 1


@pytest.mark.parametrize("width", [64, 128], ids=["same signature", "another signature"])
@pytest.mark.parametrize("priority", [STANDARD, BULK])
async def test_a_supply_of_interactive_jobs_starves_no_other_tenant(
    queue: Queue, make_submission: Make, width: int, priority: Priority
) -> None:
    """40 interactive jobs of `a` are always queued; one standard job of `b` starts when the allowance is used up."""
    await learn_cost(queue, make_submission)
    await put(queue, *[make_submission(tenant="a", priority=INTERACTIVE, width=64) for _ in range(40)])
    (other,) = await put(queue, make_submission(tenant="b", priority=priority, width=width))
    # A bulk job waits until a slot is due to bulk: a tenth of the slots.
    most = MOST_BATCHES if priority is STANDARD else MOST_BATCHES + 2
    assert await batches_until_started(queue, make_submission, other) <= most


async def test_interactive_jobs_of_a_light_tenant_go_first(queue: Queue, make_submission: Make) -> None:
    """Also in a signature of their own, and however many standard jobs of others are older."""
    await learn_cost(queue, make_submission)
    for _ in range(3):
        await put(queue, *[make_submission(tenant="a") for _ in range(SLOTS)])
        await run_batch(queue)
    await put(queue, *[make_submission(tenant="a") for _ in range(40)], make_submission(tenant="new"))
    for width in (64, 128):
        (urgent,) = await put(queue, make_submission(tenant="light", priority=INTERACTIVE, width=width))
        assert urgent in {one.job.id for one in await run_batch(queue, 1)}


async def test_a_tenants_own_jobs_are_ordered_by_priority(queue: Queue, make_submission: Make) -> None:
    """Beyond its allowance, too: its interactive jobs precede its standard ones."""
    await learn_cost(queue, make_submission)
    await learn_cost(queue, make_submission, "a")
    for _ in range(5):
        await put(queue, *[make_submission(tenant="a") for _ in range(SLOTS)])
        await run_batch(queue)
    await put(queue, *[make_submission(tenant="a") for _ in range(2)])
    await put(queue, *[make_submission(tenant="a", width=128) for _ in range(2)])
    await put(queue, *[make_submission(tenant="a", priority=INTERACTIVE) for _ in range(2)])
    await put(queue, *[make_submission(tenant="b") for _ in range(2)])
    seen = [(one.job.tenant, one.job.priority) for one in await claim(queue, 5)]
    assert seen[:2] == [("b", STANDARD)] * 2
    assert seen[2:] == [("a", INTERACTIVE)] * 2 + [("a", STANDARD)]


async def test_slots_are_used_while_the_least_served_tenant_cannot_start(queue: Queue, make_submission: Make) -> None:
    """The other job needs more slots than are free: interactive jobs beyond their allowance start meanwhile."""
    await learn_cost(queue, make_submission)
    for _ in range(5):
        await put(queue, *[make_submission(tenant="a") for _ in range(SLOTS)])
        await run_batch(queue)
    await put(queue, make_submission(tenant="b", width=128, n=4))
    ids = await put(queue, *[make_submission(tenant="a", priority=INTERACTIVE) for _ in range(2)])
    assert {one.job.id for one in await claim(queue, 2)} == set(ids)


async def test_a_joined_batch_is_left_to_an_overdue_job_of_another_tenant(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    """Interactive jobs beyond the allowance do not keep a batch alive while a less served tenant waits."""
    queue = queue_with(overdue_ms=1)
    await learn_cost(queue, make_submission)
    for _ in range(5):
        await put(queue, *[make_submission(tenant="a", priority=INTERACTIVE) for _ in range(SLOTS)])
        await run_batch(queue)
    await put(queue, make_submission(tenant="a", priority=INTERACTIVE))
    (running,) = await claim(queue)
    (other,) = await put(queue, make_submission(tenant="b", width=128))
    await put(queue, make_submission(tenant="a", priority=INTERACTIVE))
    await a_moment(5)
    held_back: list[str] = []
    assert not await queue.claims.join("w1", running.signature, 1, models=MODELS, on_overdue=held_back.append)
    assert held_back == [running.signature]
    (light,) = await put(queue, make_submission(tenant="light", priority=INTERACTIVE))
    joined = await queue.claims.join("w1", running.signature, 4, models=MODELS)
    assert [one.job.id for one in joined] == [light]
    assert await end(queue, running)
    assert [one.job.id for one in await claim(queue, 1, "w2")] == [other]


async def test_only_tenants_within_their_allowance_preempt_the_rows_of_others(
    queue: Queue, make_submission: Make
) -> None:
    """A full worker names the tenants of the rows that would be preempted; a tenant can always preempt its own."""
    await learn_cost(queue, make_submission)
    for _ in range(5):
        await put(queue, *[make_submission(tenant="a") for _ in range(SLOTS)])
        await run_batch(queue)
    await put(queue, make_submission(tenant="b"))
    (running,) = await claim(queue)
    (urgent,) = await put(queue, make_submission(tenant="a", priority=INTERACTIVE, width=128))
    options: dict[str, Any] = {"min_priority": INTERACTIVE, "has_other_jobs": True}
    assert await queue.claims.claim("w1", MODELS, SLOTS, preempted=("b",), **options) == []
    assert await state_of(queue, urgent) is State.QUEUED
    (light,) = await put(queue, make_submission(tenant="light", priority=INTERACTIVE))
    joined = await queue.claims.join(
        "w1", running.signature, 4, models=MODELS, min_priority=INTERACTIVE, preempted=("b",)
    )
    assert [one.job.id for one in joined] == [light]
    claims = await queue.claims.claim("w1", MODELS, SLOTS, preempted=("a",), **options)
    assert [one.job.id for one in claims] == [urgent]


async def test_the_allowance_is_a_setting(queue_with: Callable[..., Queue], make_submission: Make) -> None:
    """Without one, the least-served tenant goes first whatever the priority."""
    queue = queue_with(interactive_allowance_s=0)
    await learn_cost(queue, make_submission, "a")
    await put(queue, make_submission(tenant="a", priority=INTERACTIVE), make_submission(tenant="b"))
    assert [one.job.tenant for one in await claim(queue, 1)] == ["b"]
