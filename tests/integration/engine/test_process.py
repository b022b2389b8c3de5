"""An engine in a process of its own does what one in this process does, and its end is noticed."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.engine import Recorder, Room, a_job, a_spec
from harness.waiting import wait_until
from tiny import registry

from shared.config.models_file import Limits
from shared.errors import ConfigurationError
from shared.job import Task
from worker.engine import ModelLoadFailed, remote
from worker.engine.channel import SharedArray
from worker.engine.remote import RemoteEngine
from worker.leases import StallLimits, stalled

LIMITS = StallLimits(factor=20, floor_s=60)


@pytest.fixture(scope="module")
def room(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    """An engine's process with a model of pictures, one of videos, and one that is not there."""
    film = tmp_path_factory.mktemp("film")
    registry.save_tiny("wan-2.2-ti2v", film)
    videos = a_spec(film, "film", tasks=(Task.TEXT_TO_VIDEO,), limits=Limits(multiple_of=32, max_frames=17))
    missing = a_spec(film / "nowhere", "missing")
    room = Room(a_spec(tiny_models / "sd"), videos, missing, make=RemoteEngine)
    with room.started() as engine:
        engine.warm_up()
        yield room


def heard_of(job: str, recorder: Recorder) -> Counter[Any]:
    """Return what a listener heard of a job."""
    return Counter(told for told in recorder.heard if told[1] == job)


def test_it_tells_how_it_stands(room: Room) -> None:
    standing = room.engine.status()
    assert standing.device == "cpu"
    assert standing.loaded_models == ("tiny", "film")
    assert set(standing.load_seconds) == {"tiny", "film"}
    assert "nowhere" in standing.unavailable_models["missing"]
    assert standing.memory_bytes > standing.models_bytes > 0
    assert not standing.activity.busy
    assert ModelLoadFailed("missing") in room.recorder.model_events


@pytest.mark.parametrize("fields", [{"n": 2, "steps": 5, "previews": 2}, {"strength": 0.5}])
def test_pictures_and_what_is_told_of_them_are_the_same(room: Room, tiny_models: Path, fields: dict[str, Any]) -> None:
    """Progress, previews, results and forwards, of one job alone so that nothing depends on who met whom."""
    job = a_job("-".join(fields), **fields)
    local = Room(a_spec(tiny_models / "sd"))
    with local.started() as engine:
        engine.warm_up()
        local.seat(job)
        local.recorder.wait_for([job.id])
    here, first = local.recorder, len(room.recorder.facts)
    room.seat(job)
    room.recorder.wait_for([job.id])
    assert heard_of(job.id, room.recorder) == heard_of(job.id, here)
    assert room.recorder.rows[first:] == here.rows
    assert room.recorder.ended[job.id].batching == here.ended[job.id].batching
    for key, pixels in here.pictures.items():
        np.testing.assert_array_equal(room.recorder.pictures[key], pixels)


def test_frames_of_a_video_come_in_the_memory_they_were_made_in(room: Room) -> None:
    room.seat(a_job("video", model="film", task=Task.TEXT_TO_VIDEO, frames=5, fps=8, steps=2))
    room.recorder.wait_for(["video"])
    frames = room.recorder.made["video", 0].pixels
    assert isinstance(frames, SharedArray)
    assert frames.shape == (5, 64, 64, 3)
    assert frames.max() > 0


def test_jobs_meet_in_it_and_leave_when_they_are_to(room: Room) -> None:
    names = [f"long-{at}" for at in range(6)]
    room.seat(*(a_job(name, steps=900) for name in names))
    wait_until(lambda: 6 in room.recorder.rows, "all share a forward")
    wait_until(lambda: room.engine.status().activity.busy, "it tells that it is at work")
    room.engine.cancel(names[0])
    room.recorder.wait_for(names[:1])
    assert not set(names[1:]) & set(room.recorder.ended)
    room.engine.release_all()
    room.recorder.wait_for(names)
    assert all(room.recorder.ended[name].canceled for name in names)


def test_a_device_that_is_not_there_keeps_it_from_starting(tiny_models: Path) -> None:
    with (
        Room(a_spec(tiny_models / "sd"), make=RemoteEngine, device="nonsense").started() as engine,
        pytest.raises(ConfigurationError, match="FUSEQUEUE_DEVICE: 'nonsense'"),
    ):
        engine.warm_up()


def test_its_silence_and_its_end_are_noticed(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped with a job in hand, it is hung once it has been silent for too long; killed, it is at once.

    The silence counts from when it was noticed: what was stopped may also have been the worker.
    """
    monkeypatch.setattr(remote, "SILENT_S", 0.5)
    room = Room(a_spec(tiny_models / "sd"), make=RemoteEngine)
    with room.started() as engine:
        engine.warm_up()
        pid = engine._process.pid
        os.kill(pid, signal.SIGSTOP)
        room.seat(a_job("late"))
        wait_until(lambda: engine.status().activity.busy, "its silence is noticed")
        noticed = engine.status().activity.since_s
        assert not stalled(engine.status().activity, noticed + 59, LIMITS)
        assert stalled(engine.status().activity, noticed + 61, LIMITS)
        os.kill(pid, signal.SIGCONT)
        room.recorder.wait_for(["late"])
        assert not stalled(engine.status().activity, time.monotonic(), LIMITS)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: stalled(engine.status().activity, time.monotonic(), LIMITS), "its end is noticed")
