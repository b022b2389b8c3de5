"""An engine in another process works like one in this process, and its end is detected."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from harness.engine import EngineHarness, EventRecorder, a_job, a_spec
from harness.waiting import wait_until

from shared.config.request_limits import Limits
from shared.errors import ConfigurationError
from shared.tasks import Task
from worker.claims.leases import StallLimits, stalled
from worker.engine import remote
from worker.engine.channel import SharedArray
from worker.engine.protocol import ModelLoadFailed
from worker.engine.remote import EngineProcess, RemoteEngine

LIMITS = StallLimits(factor=20, floor_s=60)


@pytest.fixture(scope="module")
def harness(tiny_models: Path, tiny_model: Callable[[str], Path]) -> Iterator[EngineHarness]:
    """An engine process with an image model, a video model and a missing model."""
    film = tiny_model("wan-2.2-ti2v")
    videos = a_spec(film, "film", tasks=(Task.TEXT_TO_VIDEO,), limits=Limits(multiple_of=32, max_frames=17))
    missing = a_spec(film / "nowhere", "missing")
    harness = EngineHarness(a_spec(tiny_models / "sd"), videos, missing, factory=RemoteEngine)
    with harness.started() as engine:
        engine.warm_up()
        yield harness


def events_of(job: str, recorder: EventRecorder) -> Counter[Any]:
    """Return the recorded events of a job."""
    return Counter(event for event in recorder.log if event[1] == job)


def test_the_status_reaches_the_worker(harness: EngineHarness) -> None:
    status = harness.engine.status()
    assert status.device == "cpu"
    assert status.loaded_models == ("tiny", "film")
    assert set(status.load_seconds) == {"tiny", "film"}
    failure = status.unavailable_models["missing"]
    assert "nowhere" in failure.reason
    assert failure.permanent
    assert status.memory_bytes > status.models_bytes > 0
    wait_until(lambda: not harness.engine.status().activity.busy, "the status says that no job runs")
    assert ModelLoadFailed("missing") in harness.recorder.model_events


@pytest.mark.usefixtures("shared_models")
@pytest.mark.parametrize("fields", [{"n": 2, "steps": 5, "previews": 2}, {"strength": 0.5}])
def test_outputs_and_events_equal_those_of_a_local_engine(
    harness: EngineHarness, tiny_models: Path, fields: dict[str, Any]
) -> None:
    """Progress, previews, outputs and forwards of a job without batch mates."""
    job = a_job("-".join(fields), **fields)
    local = EngineHarness(a_spec(tiny_models / "sd"))
    with local.started() as engine:
        engine.warm_up()
        local.submit(job)
        local.recorder.wait_for([job.id])
    expected, first = local.recorder, len(harness.recorder.forwards)
    harness.submit(job)
    harness.recorder.wait_for([job.id])
    assert events_of(job.id, harness.recorder) == events_of(job.id, expected)
    assert harness.recorder.rows[first:] == expected.rows
    assert harness.recorder.finished[job.id].batching == expected.finished[job.id].batching
    for key, pixels in expected.images.items():
        np.testing.assert_array_equal(harness.recorder.images[key], pixels)


def test_the_frames_of_a_video_arrive_in_shared_memory(harness: EngineHarness) -> None:
    harness.submit(a_job("video", model="film", task=Task.TEXT_TO_VIDEO, frames=5, fps=8, steps=2))
    harness.recorder.wait_for(["video"])
    frames = harness.recorder.outputs["video", 0].pixels
    assert isinstance(frames, SharedArray)
    assert frames.shape == (5, 64, 64, 3)
    assert frames.max() > 0


def test_jobs_share_forwards_and_can_be_canceled(harness: EngineHarness) -> None:
    names = [f"long-{at}" for at in range(6)]
    harness.submit(*(a_job(name, steps=900) for name in names))
    wait_until(lambda: 6 in harness.recorder.rows, "all share a forward")
    wait_until(lambda: harness.engine.status().activity.busy, "the status is busy")
    harness.engine.cancel(names[0])
    harness.recorder.wait_for(names[:1])
    assert not set(names[1:]) & set(harness.recorder.finished)
    harness.engine.release_all()
    harness.recorder.wait_for(names)
    assert all(harness.recorder.finished[name].canceled for name in names)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_missing_is_the_only_error_of_the_start(device: str, tiny_models: Path) -> None:
    """A process that ends by itself at its start is not reported as hung or killed."""
    with (
        structlog.testing.capture_logs() as logs,
        EngineHarness(a_spec(tiny_models / "sd"), factory=RemoteEngine, device=device).started() as engine,
    ):
        with pytest.raises(ConfigurationError, match=rf"FUSEQUEUE_DEVICE: '{device}'.*; set FUSEQUEUE_DEVICE to"):
            engine.warm_up()
        assert not stalled(engine.status().activity, time.monotonic(), LIMITS)
    assert [line["event"] for line in logs] == []


def test_a_process_that_is_killed_at_its_start_is_the_only_error(tiny_models: Path) -> None:
    with (
        structlog.testing.capture_logs() as logs,
        EngineHarness(a_spec(tiny_models / "sd"), factory=RemoteEngine).started() as engine,
    ):
        engine._process.kill()
        with pytest.raises(ConfigurationError, match="before its models were loaded: status -9"):
            engine.warm_up()
        assert not stalled(engine.status().activity, time.monotonic(), LIMITS)
    assert [line["event"] for line in logs] == []


def test_an_engine_that_finds_no_gpu_warns_unless_it_is_to_use_the_cpu(
    tiny_models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with EngineHarness(a_spec(tiny_models / "sd"), factory=RemoteEngine, device=None).started() as engine:
        engine.warm_up()
        if engine.status().device != "cpu":
            pytest.skip("there is a GPU")
    log = capfd.readouterr()
    assert (log.out + log.err).count("no_gpu") == 1
    assert "FUSEQUEUE_DEVICE" in log.out + log.err
    with EngineHarness(a_spec(tiny_models / "sd"), factory=RemoteEngine).started() as engine:
        engine.warm_up()
    log = capfd.readouterr()
    assert "no_gpu" not in log.out + log.err


def test_a_stopped_process_and_a_killed_one_are_reported_as_hung(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped with a job in hand, it is hung once it has been silent for too long; killed, it is at once.

    The silence counts from when it was detected: what was stopped may also have been the worker.
    """
    monkeypatch.setattr(remote, "SILENT_S", 0.5)
    harness = EngineHarness(a_spec(tiny_models / "sd"), factory=RemoteEngine)
    with harness.started() as engine:
        engine.warm_up()
        pid = engine._process.pid
        os.kill(pid, signal.SIGSTOP)
        harness.submit(a_job("late"))
        wait_until(lambda: engine.status().activity.busy, "the silence is detected")
        detected = engine.status().activity.since_s
        assert not stalled(engine.status().activity, detected + 59, LIMITS)
        assert stalled(engine.status().activity, detected + 61, LIMITS)
        os.kill(pid, signal.SIGCONT)
        harness.recorder.wait_for(["late"])
        assert not stalled(engine.status().activity, time.monotonic(), LIMITS)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: stalled(engine.status().activity, time.monotonic(), LIMITS), "the end is detected")


def test_a_process_ends_quietly_if_its_worker_never_begins(capfd: pytest.CaptureFixture[str]) -> None:
    """It starts before its worker has reached Redis."""
    process = EngineProcess(())
    process.channel.close()
    assert process.wait(60) == 1
    assert "Traceback" not in capfd.readouterr().err
