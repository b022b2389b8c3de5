"""Streams beside sources that wait, callbacks that fail, and an engine that is closed meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from harness.http_server import ROOT
from harness.waiting import wait_until

from library import AsyncEngine, Engine, GenerationFailed, streams
from library import session as sessions
from shared.errors import ConfigurationError, InferenceFailed

DEMO = ROOT / "demo" / "model"
CIRCLE = "a red circle on a blue ground, left"
FIELDS: dict[str, Any] = {"width": 64, "height": 64, "steps": 4, "seed": 7}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(DEMO, max_batch=4, device="cpu") as started:
        yield started


def test_results_come_while_the_source_waits(engine: Engine) -> None:
    seen = threading.Event()

    def prompts() -> Iterator[str]:
        yield CIRCLE
        assert seen.wait(30), "the first result waits for the second prompt"
        yield CIRCLE

    indexes = []
    for result in engine.stream(prompts(), **FIELDS):
        seen.set()
        indexes.append(result.index)
    assert indexes == [0, 1]


@pytest.fixture
def slow_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that were started one by one would be steps apart."""
    job_of = sessions.job_of

    def slow(*arguments: Any) -> Any:
        time.sleep(0.02)
        return job_of(*arguments)

    monkeypatch.setattr(sessions, "job_of", slow)
    monkeypatch.setattr(streams, "PREPARE_S", 60.0)


@pytest.mark.usefixtures("slow_preparation")
def test_prompts_of_a_list_start_together(engine: Engine) -> None:
    results = list(engine.stream([CIRCLE] * 16, **FIELDS))
    assert {result.batching.rows_by_forward for result in results} == {((4, 4),)}


@pytest.mark.usefixtures("slow_preparation")
def test_prompts_that_a_thread_reads_start_together(engine: Engine) -> None:
    results = list(engine.stream(iter([CIRCLE] * 16), **FIELDS))
    assert min(result.batching.mean_rows for result in results) > 2  # 4, unless the thread stands still


@pytest.mark.usefixtures("slow_preparation")
async def test_prompts_of_an_asynchronous_source_start_together() -> None:
    async def prompts() -> AsyncIterator[str]:
        for _ in range(16):
            yield CIRCLE

    async with AsyncEngine(DEMO, max_batch=4, device="cpu") as engine:
        results = [result async for result in engine.stream(prompts(), **FIELDS)]
    assert {result.batching.rows_by_forward for result in results} == {((4, 4),)}


def test_an_error_of_the_source_is_raised(engine: Engine) -> None:
    def prompts() -> Iterator[str]:
        yield CIRCLE
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        list(engine.stream(prompts(), **FIELDS))
    with pytest.raises(TypeError):
        list(engine.stream(5, **FIELDS))
    assert len(engine.generate([CIRCLE], progress=False, **FIELDS)) == 1


def test_a_source_that_waits_is_left_with_the_loop(engine: Engine) -> None:
    waiting, go_on = threading.Event(), threading.Event()

    def prompts() -> Iterator[str]:
        yield CIRCLE
        waiting.set()
        go_on.wait(30)

    before = set(threading.enumerate())
    stream = engine.stream(prompts(), **FIELDS)
    next(stream)
    waiting.wait(30)
    stream.close()
    go_on.set()
    wait_until(lambda: set(threading.enumerate()) <= before, "the thread of the source has ended")


def test_callbacks_neither_end_the_engine_nor_wait_for_it(engine: Engine) -> None:
    raised: list[BaseException] = []

    def leave(*_: object) -> None:
        raise SystemExit

    def use(*_: object) -> None:
        for action in (lambda: engine.generate(CIRCLE, progress=False), engine.close):
            try:
                action()
            except ConfigurationError as error:
                raised.append(error)

    for callback in (leave, use):
        (result,) = engine.stream([CIRCLE], on_progress=callback, **FIELDS)
        assert result.error is None
    assert len(raised) == 2 * FIELDS["steps"]
    assert "cannot use the engine" in str(raised[0])


def test_close_ends_a_stream_with_errors() -> None:
    engine = Engine(DEMO, max_batch=2, device="cpu")
    errors = []
    for result in engine.stream(({"prompt": CIRCLE} for _ in iter(int, 1)), **FIELDS | {"steps": 40}):
        errors.append(result.error)
        engine.close()
    assert errors[0] is None
    assert isinstance(errors[-1], InferenceFailed)


def test_close_fails_all_items_that_are_not_done() -> None:
    engine, started = Engine(DEMO, max_batch=2, device="cpu"), threading.Event()

    def close() -> None:
        started.wait(30)
        engine.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(GenerationFailed) as raised:
        engine.generate([CIRCLE] * 20, progress=False, on_progress=lambda *_: started.set(), **FIELDS | {"steps": 40})
    closing.join()
    assert [result.index for result in raised.value.results] == list(range(20))
    assert isinstance(raised.value.results[19].error, InferenceFailed)


def test_an_item_submitted_while_the_engine_closes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(DEMO, device="cpu")
    job_of = sessions.job_of

    def slow(*arguments: Any) -> Any:
        made = job_of(*arguments)
        engine.close()
        return made

    monkeypatch.setattr(sessions, "job_of", slow)
    (result,) = engine.stream([CIRCLE], **FIELDS)
    assert isinstance(result.error, InferenceFailed)


async def test_an_asynchronous_source_can_wait_for_results() -> None:
    seen: asyncio.Queue[int] = asyncio.Queue()

    async def prompts() -> AsyncIterator[str]:
        for _ in range(3):
            yield CIRCLE
            await seen.get()

    async with AsyncEngine(DEMO, max_batch=4, device="cpu") as engine, asyncio.timeout(60):
        indexes = []
        async for result in engine.stream(prompts(), **FIELDS):
            indexes.append(result.index)
            seen.put_nowait(result.index)
        assert indexes == [0, 1, 2]


async def test_a_source_that_blocks_leaves_the_event_loop_to_others() -> None:
    """Here the second prompt waits for the first result, which the loop has to pass on."""
    seen, before = threading.Event(), set(threading.enumerate())

    def prompts() -> Iterator[str]:
        yield CIRCLE
        assert seen.wait(30), "the loop waits for the second prompt"
        yield CIRCLE

    async with AsyncEngine(DEMO, max_batch=4, device="cpu") as engine, asyncio.timeout(60):
        indexes = []
        async for result in engine.stream(prompts(), **FIELDS):
            seen.set()
            indexes.append(result.index)
        assert indexes == [0, 1]
    assert "prompts" not in {one.name for one in set(threading.enumerate()) - before}


async def test_leaving_an_asynchronous_stream_ends_its_source() -> None:
    ended = asyncio.Event()

    async def prompts() -> AsyncIterator[str]:
        try:
            yield CIRCLE
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with AsyncEngine(DEMO, max_batch=4, device="cpu") as engine, asyncio.timeout(60):
        stream = engine.stream(prompts(), **FIELDS)
        await anext(stream)
        await stream.aclose()
        assert ended.is_set()


async def test_items_are_prepared_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    job_of = sessions.job_of

    def noted(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return job_of(*arguments)

    monkeypatch.setattr(sessions, "job_of", noted)
    async with AsyncEngine(DEMO, device="cpu") as engine:
        await engine.generate([CIRCLE], **FIELDS)
    assert threads
    assert threading.get_ident() not in threads


async def test_an_item_that_is_left_while_it_is_prepared_is_canceled(monkeypatch: pytest.MonkeyPatch) -> None:
    job_of, preparing, go_on = sessions.job_of, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        preparing.set()
        go_on.wait(30)
        return job_of(*arguments)

    canceled = []
    monkeypatch.setattr(sessions, "job_of", slow)
    monkeypatch.setattr(sessions.Session, "cancel", lambda _, future: canceled.append(future))
    async with AsyncEngine(DEMO, device="cpu") as engine:
        task = asyncio.create_task(engine.generate([CIRCLE], **FIELDS))
        await asyncio.to_thread(preparing.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await asyncio.to_thread(wait_until, lambda: canceled, "the item is canceled")


async def test_an_engine_that_is_not_started_says_so() -> None:
    engine = AsyncEngine(DEMO, device="cpu")
    with pytest.raises(ConfigurationError, match="not started; use async with, or await start"):
        await engine.generate([CIRCLE], **FIELDS)
    await engine.close()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"device": "foo"}, "device: 'foo' is not a torch device"),
        ({"device": "cuda:99"}, "device: 'cuda:99'"),
        ({"limits": 3}, "limits: it must be a table, not int"),
        ({"defaults": "x"}, "defaults: it must be a table, not str"),
        ({"tasks": 3}, "tasks: it must be a list, not int"),
        ({"tasks": ["paint"]}, "tasks: 'paint' is none"),
        ({"max_batch": "many"}, "max_batch"),
        ({"max_batch": None}, "max_batch"),
        ({"adapters": {"ink": "/nope.safetensors"}}, "adapters: 'ink': there is no file /nope.safetensors"),
        ({"adapters": {"ink": "a/nope.safetensors"}}, "adapters: 'ink': there is no file a/nope.safetensors"),
    ],
)
def test_an_option_of_the_wrong_kind_is_named(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigurationError, match=fault):
        Engine(DEMO, **{"device": "cpu", **options})
