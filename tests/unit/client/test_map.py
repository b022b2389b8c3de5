"""Jobs for many prompts, with results in order, against the real API."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import working

from fusequeue import (
    AsyncClient,
    Busy,
    Invalid,
    InvalidArgument,
    JobFailed,
    JobsFailed,
    NotFound,
    Prompt,
    RefusedError,
    Result,
    Unauthorized,
)
from fusequeue.mapping import concerns_one, end_of_delay
from fusequeue.progress_bar import bar_line
from shared.queue import Queue

Work = Callable[..., Awaitable[bytes]]


async def collected(results: AsyncGenerator[Result]) -> list[Result]:
    return [result async for result in results]


async def count_jobs(api: AsyncClient) -> int:
    return len([job async for job in api.jobs()])


async def test_results_are_in_order_and_saved_under_their_numbers(
    api: AsyncClient, work: Work, eventually: Callable[..., Awaitable[None]], tmp_path: Path
) -> None:
    """Prompts are texts or the parameters in which a job differs; here the second one is made first."""
    prompts: list[Prompt] = ["a red circle", {"prompt": "a blue cross", "seed": 9, "priority": "interactive"}]
    running = asyncio.create_task(collected(api.map("demo", prompts, folder=tmp_path / "out", seed=7, steps=4)))

    async def both_are_queued() -> bool:
        return await count_jobs(api) == 2

    await eventually(both_are_queued)
    for _ in prompts:
        await work()
    results = await running
    assert [(one.index, one.job.prompt, one.job.seed, one.job.steps) for one in results] == [
        (0, "a red circle", 7, 4),
        (1, "a blue cross", 9, 4),
    ]
    assert [file.name for one in results for file in one.files] == ["00000-0.png", "00001-0.png"]
    assert results[0].files[0].read_bytes() == results[0].data[0]


async def test_a_job_that_fails_ends_no_other(api: AsyncClient, work: Work) -> None:
    """Which of them have failed is known after the last result."""
    results: list[Result] = []

    async def read() -> None:
        async for result in api.map("demo", ["a", "b", "c"], at_once=1):
            results.append(result)

    running = asyncio.create_task(read())
    for failure in (None, "NaN", None):
        await work(failure)
    with pytest.raises(JobsFailed, match=r"1 of 3 jobs failed; number 1: .*NaN") as caught:
        await running
    assert [one.index for one in results] == [0, 2]
    failure = caught.value.failures[1]
    assert isinstance(failure, JobFailed)
    assert failure.job.prompt == "b"


@pytest.mark.parametrize(
    ("faulty", "error"),
    [
        ({"prompt": "b", "steps": 0}, Invalid),
        ({"prompt": "b", "image": "missing.png"}, FileNotFoundError),
        ({"prompt": "b", "image": 7}, InvalidArgument),
    ],
)
@pytest.mark.parametrize("at", [0, 1])
async def test_a_prompt_that_is_refused_ends_no_other(
    api: AsyncClient, fake_queue: Queue, tmp_path: Path, at: int, faulty: Prompt, error: type[Exception]
) -> None:
    """Also the first one, before the service has accepted any."""
    prompts: list[Prompt] = ["a", "c"]
    prompts.insert(at, faulty)
    results: list[Result] = []

    async def read() -> None:
        async for result in api.map("demo", prompts):
            results.append(result)

    async with working(fake_queue, tmp_path):
        with pytest.raises(JobsFailed, match=f"1 of 3 jobs failed; number {at}: ") as caught:
            await read()
    assert [one.job.prompt for one in results] == ["a", "c"]
    assert isinstance(caught.value.failures[at], error)


async def test_a_key_that_another_prompt_has_used_refuses_its_job_only(
    api: AsyncClient, fake_queue: Queue, tmp_path: Path
) -> None:
    """As in a rerun with a prompt that was changed."""
    async with working(fake_queue, tmp_path):
        await collected(api.map("demo", ["a", "b"], idempotency_key="nightly"))
        with pytest.raises(JobsFailed, match=r"1 of 2 jobs failed; number 0: .*another body"):
            await collected(api.map("demo", ["changed", "b"], idempotency_key="nightly"))


def refusal(field: str | None, kind: type[RefusedError] = Invalid, status: int = 422) -> RefusedError:
    return kind("refused", status=status, code="invalid_request", param=field)


@pytest.mark.parametrize(
    ("error", "own", "has_accepted", "expected"),
    [
        (refusal("prompt"), {"prompt"}, False, True),
        (refusal("images.0"), {"prompt", "images"}, False, True),
        (refusal("adapters[0].scale"), {"prompt", "adapters"}, False, True),
        (refusal("steps"), {"prompt", "seed"}, False, False),
        (refusal("steps"), {"prompt", "seed"}, True, True),
        (refusal(None), {"prompt"}, False, False),
        (refusal("model", NotFound, 404), {"prompt"}, False, False),
        (refusal(None, Unauthorized, 401), {"prompt", "seed"}, True, False),
        (refusal(None, Busy, 429), {"prompt", "seed"}, True, False),
        (refusal(None, RefusedError, 500), {"prompt", "seed"}, True, False),
        (FileNotFoundError("a.png"), {"prompt"}, False, False),
        (FileNotFoundError("a.png"), {"prompt", "image"}, False, True),
    ],
)
def test_a_fault_of_all_jobs_is_distinguished_from_that_of_one(
    error: Exception, own: set[str], has_accepted: bool, expected: bool
) -> None:
    assert concerns_one(error, own, has_accepted=has_accepted) is expected


async def test_endless_prompts_are_read_as_jobs_end(api: AsyncClient, fake_queue: Queue, tmp_path: Path) -> None:
    read: list[int] = []

    def prompts() -> Iterator[str]:
        while True:
            read.append(len(read))
            yield "a red circle"

    async with working(fake_queue, tmp_path), aclosing(api.map("demo", prompts(), at_once=2)) as results:
        async for result in results:
            if result.index == 3:
                break
    assert len(read) <= 3 + 2 + 1


async def test_prompts_that_wait_hold_up_no_result(api: AsyncClient, fake_queue: Queue, tmp_path: Path) -> None:
    """They are read on a thread: here the second one waits for the first one's result."""
    first_is_there = asyncio.Event()
    loop = asyncio.get_running_loop()

    def prompts() -> Iterator[str]:
        yield "a red circle"
        asyncio.run_coroutine_threadsafe(first_is_there.wait(), loop).result(60)
        yield "a blue cross"

    async with working(fake_queue, tmp_path):
        async for _ in api.map("demo", prompts()):
            first_is_there.set()
    assert await count_jobs(api) == 2


async def test_a_repeated_map_finds_its_jobs(api: AsyncClient, fake_queue: Queue, tmp_path: Path) -> None:
    async with working(fake_queue, tmp_path):
        runs = [await collected(api.map("demo", ["a", "b"], idempotency_key="nightly")) for _ in range(2)]
    assert [one.job.id for one in runs[0]] == [one.job.id for one in runs[1]]
    assert await count_jobs(api) == 2


async def test_delays_count_from_the_start_of_the_map(
    api: AsyncClient, eventually: Callable[..., Awaitable[None]]
) -> None:
    """Jobs are submitted as others end; all are due at the same time, but for one with a delay of its own."""
    prompts: list[Prompt] = ["a", "b", {"prompt": "c", "not_before": 1200}]
    running = asyncio.create_task(collected(api.map("demo", prompts, not_before=timedelta(minutes=10))))

    async def all_are_queued() -> bool:
        return await count_jobs(api) == 3

    await eventually(all_are_queued)
    due = {job.prompt: job.not_before async for job in api.jobs()}
    await api.matching.cancel(status="queued")
    with pytest.raises(JobsFailed):
        await running
    assert due["a"] is not None
    assert (due["b"], due["c"]) == (due["a"], due["a"] + timedelta(minutes=10))


BEGAN = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "ends"),
    [
        (timedelta(hours=1), datetime(2026, 1, 31, 13, tzinfo=UTC)),
        (90, datetime(2026, 1, 31, 12, 1, 30, tzinfo=UTC)),
        (0.5, datetime(2026, 1, 31, 12, 0, 0, 500_000, tzinfo=UTC)),
        *(
            (value, None)
            for value in (0, -1, True, math.nan, math.inf, timedelta.max, "2026-01-31T22:00:00Z", BEGAN, None)
        ),
    ],
)
def test_only_a_delay_has_an_end(value: object, ends: datetime | None) -> None:
    """What the service refuses is sent as it is, so that its error names it."""
    assert end_of_delay(value, BEGAN) == ends


async def test_what_is_wrong_for_all_jobs_is_raised_at_once(api: AsyncClient) -> None:
    with pytest.raises(Invalid, match="steps"):
        await collected(api.map("demo", ["a", "b"], steps=0))
    assert await count_jobs(api) == 0


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("a red circle", {}, "prompts: 'a red circle' is no list"),
        ([3], {}, "prompts: 3 is no text"),
        (["a"], {"at_once": 0}, "at_once: 0 runs no job"),
        (["a"], {"timeout_s": -1}, "timeout_s: -1 is not"),
        (["a"], {"idempotency_key": "ä"}, "idempotency_key: 'ä-0' is not"),
        (["a"], {"idempotency_key": "a", "not_before": 60}, "not_before: a rerun .* would count the delay 60 anew"),
    ],
)
async def test_arguments_that_cannot_be_meant_are_named(
    api: AsyncClient, prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await collected(api.map("demo", prompts, **options))


@pytest.mark.parametrize(
    ("done", "total", "passed_s", "line"),
    [
        (0, 24, 0.0, "░░░░░░░░░░░░░░░░░░░░░░░░ 0/24 0:00"),
        (6, 24, 61.0, "██████░░░░░░░░░░░░░░░░░░ 6/24 1:01, 3:03 left"),
        (24, 24, 3601.0, "████████████████████████ 24/24 1:00:01"),
        (0, 0, 0.0, "████████████████████████ 0/0 0:00"),
        (5, None, 9.0, "5 done, 0:09"),  # of an iterator
    ],
)
def test_a_bar_has_counts_and_times(done: int, total: int | None, passed_s: float, line: str) -> None:
    assert bar_line(done, total, passed_s) == line
