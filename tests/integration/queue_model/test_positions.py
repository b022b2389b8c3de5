"""The position of a queued job is the number of claims before its own, within the turns of tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pytest
from conftest import RedisServer
from harness.queue import check_keys, claim, end, lose, put
from hypothesis import HealthCheck, event, given, seed, settings
from hypothesis import strategies as st

from shared.config.settings import Settings
from shared.job_fields import Priority
from shared.queue import Queue, QueueClient, Submission
from shared.queue.connections.pools import connect_commands

TENANTS = ("a", "b", "c")
STANDARD = Priority.STANDARD


class QueuedSpec(NamedTuple):
    tenant: str
    priority: Priority


class Case(NamedTuple):
    """Jobs, and what becomes of the first ones that are claimed: they are released, lost or done."""

    jobs: Sequence[QueuedSpec]
    started: Sequence[str]


spec = st.builds(QueuedSpec, st.sampled_from(TENANTS), st.sampled_from(tuple(Priority)))
endings = st.lists(st.sampled_from(("released", "lost", "done")), max_size=4)
cases = st.builds(Case, st.lists(spec, min_size=1, max_size=14), endings)
of_equal_tenants = st.builds(
    Case,
    st.integers(1, 5).flatmap(lambda each: st.permutations([QueuedSpec(name, STANDARD) for name in each * TENANTS])),
    st.lists(st.just("released"), max_size=4),
)
of_one_tenant = cases.map(lambda case: case._replace(jobs=[one._replace(tenant="a") for one in case.jobs]))


class Observed(NamedTuple):
    """A job's position, the claims before its own, and the other tenants' jobs of its priority that can take turns."""

    position: int
    claims: int
    turns: int


async def observe(queue: Queue, make: Callable[..., Submission], case: Case) -> list[Observed]:
    """Return what is seen of the queued jobs, one worker with one slot claiming them one after the other."""
    specs = dict(zip(await put(queue, *[make(**one._asdict()) for one in case.jobs]), case.jobs, strict=True))
    await start_some(queue, case.started)
    positions = {job_id: await queue.jobs.position(job_id) for job_id in specs}
    claimed: list[str] = []
    while claims := await claim(queue, 1):
        (one,) = claims
        await end(queue, one, device_seconds=1.0 + len(claimed) / 1000)  # equal usage would be ordered by name
        claimed.append(one.job.id)
    places = {
        job_id: place.position
        for job_id, place in positions.items()
        if place is not None and place.position is not None
    }
    assert places.keys() == {*claimed}
    left = {job_id: specs[job_id] for job_id in claimed}
    return [Observed(places[job_id], at, turns(left, job_id)) for at, job_id in enumerate(claimed)]


async def start_some(queue: Queue, endings: Sequence[str]) -> None:
    """Claim jobs one by one; afterwards release, lose or end them."""
    running = [(ending, *await claim(queue, 1, f"w-{number}")) for number, ending in enumerate(endings)]
    for number, (ending, *claims) in enumerate(running):
        for one in claims:
            if ending == "released":
                await queue.claims.release(f"w-{number}", {one.job.id: one.epoch})
            elif ending == "lost":
                await lose(queue, one.job.id)
            else:
                await end(queue, one, f"w-{number}", device_seconds=1.0)
    await queue.maintenance.reclaim()


def turns(left: Mapping[str, QueuedSpec], job_id: str) -> int:
    mine = left[job_id]
    return sum(one.priority == mine.priority and one.tenant != mine.tenant for one in left.values())


def check(
    redis_server: RedisServer,
    settings_for: Callable[..., Settings],
    make: Callable[..., Submission],
    drawn: st.SearchStrategy[Case],
    assert_for: Callable[[Observed], None],
) -> None:
    """Observe random queues, in which priorities are strict, and check each job of them."""
    with asyncio.Runner() as runner:
        redis = connect_commands(redis_server.url)

        async def once(case: Case) -> None:
            config = settings_for(redis_server.url, bulk_share=0, interactive_allowance_s=1e6, max_attempts=9)
            queue = Queue(QueueClient(redis, namespace=config.namespace, settings=config))
            for one in await observe(queue, make, case):
                assert_for(one)
            await check_keys(queue)

        @seed(1)
        @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=drawn)
        def run(case: Case) -> None:
            event(f"started: {len(case.started)}")
            runner.run(once(case))

        try:
            run()
        finally:
            runner.run(redis.aclose())


@pytest.mark.parametrize("drawn", [of_one_tenant, of_equal_tenants], ids=["one tenant", "equal tenants"])
def test_positions_are_exact(
    redis_server: RedisServer,
    settings_for: Callable[..., Settings],
    make_submission: Callable[..., Submission],
    drawn: st.SearchStrategy[Case],
) -> None:
    def exact(one: Observed) -> None:
        assert one.position == one.claims

    check(redis_server, settings_for, make_submission, drawn, exact)


def test_between_unequal_tenants_positions_differ_by_turns(
    redis_server: RedisServer, settings_for: Callable[..., Settings], make_submission: Callable[..., Submission]
) -> None:
    def within_turns(one: Observed) -> None:
        assert abs(one.position - one.claims) <= one.turns

    check(redis_server, settings_for, make_submission, cases, within_turns)
