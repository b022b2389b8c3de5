"""Events of the engine's thread reach the claimed jobs on the event loop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shared.job import Phase
from shared.job_record import Progress
from worker.engine.outputs import Output
from worker.engine.protocol import (
    CandidatesDropped,
    EngineEvent,
    ForwardDone,
    JobFinished,
    JobPhaseChanged,
    JobProgress,
    ModelLoadFailed,
    OutputReady,
    PreviewReady,
)
from worker.engine_events import EngineEventHandler
from worker.metrics import collectors

KEY = "job_1:1"
PIXELS = np.zeros((8, 8, 3), np.uint8)
OUTPUT = Output(PIXELS)
FORWARD = ForwardDone("demo", 1, 1, 0.1, "cpu", "8x8", KEY)


class Claimed:
    """A claimed job that records its calls."""

    def __init__(self, calls: list[Any]) -> None:
        self.engine_done: asyncio.Future[JobFinished] = asyncio.get_running_loop().create_future()
        self.slots = 8
        self.update_progress = lambda phase, progress=None: calls.append((phase, progress))
        self.upload = lambda _uploader, index, output: calls.append((index, output))
        self.publish_preview = lambda _publisher, index, pixels: calls.append((index, pixels))


async def handle(*events: EngineEvent, from_thread: bool = False) -> tuple[list[Any], Claimed]:
    calls: list[Any] = []
    claimed: Any = Claimed(calls)
    handler = EngineEventHandler(
        {KEY: claimed},
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        on_change=lambda _claimed: calls.append("changed"),
        on_forward=calls.append,
    )

    def send() -> None:
        for event in events:
            handler.on_event(event)

    await asyncio.to_thread(send) if from_thread else send()
    await asyncio.sleep(0.01)
    return calls, claimed


@pytest.mark.parametrize(
    ("event", "calls"),
    [
        pytest.param(JobPhaseChanged(KEY, Phase.LOADING), [(Phase.LOADING, None), "changed"], id="loading"),
        pytest.param(
            JobProgress(KEY, 2, 5), [(Phase.DENOISING, Progress(step=2, total=5)), "changed"], id="denoising step"
        ),
        pytest.param(JobPhaseChanged(KEY, Phase.DECODING), [(Phase.DECODING, None), "changed"], id="decoding"),
        pytest.param(PreviewReady(KEY, 1, PIXELS), [(1, PIXELS)], id="preview"),
        pytest.param(OutputReady(KEY, 1, OUTPUT), [(1, OUTPUT)], id="output"),
        pytest.param(JobFinished(KEY), [(Phase.UPLOADING, None), "changed"], id="finished"),
        pytest.param(FORWARD, [FORWARD], id="forward"),
        pytest.param(JobProgress("job_2:1", 2, 5), [], id="a claim that is gone"),
    ],
)
async def test_an_event_updates_its_claimed_job(event: EngineEvent, calls: list[Any]) -> None:
    assert (await handle(event))[0] == calls


async def test_dropped_candidates_free_slots_of_their_job() -> None:
    calls, claimed = await handle(CandidatesDropped(KEY, 4))
    assert claimed.slots == 4
    assert calls == ["changed"], "so that the worker claims for the free slots"


async def test_a_finished_job_resolves_its_future_once() -> None:
    first = JobFinished(KEY)
    calls, claimed = await handle(first, JobFinished(KEY, canceled=True))
    assert claimed.engine_done.result() is first
    assert calls.count("changed") == 1


async def test_an_event_of_a_model_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Any] = []
    monkeypatch.setattr(collectors, "model_event", counted.append)
    await handle(ModelLoadFailed("demo"))
    assert counted == [ModelLoadFailed("demo")]


async def test_events_of_another_thread_keep_their_order() -> None:
    events = [JobProgress(KEY, step, 5) for step in range(1, 6)]
    calls, _ = await handle(*events, from_thread=True)
    assert [call[1].step for call in calls if call != "changed"] == [1, 2, 3, 4, 5]
