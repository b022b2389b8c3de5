"""When an engine takes checkpoints, and what becomes of a job whose checkpoint it cannot use."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.checkpoints import files_of, halfway, resumed, run_with_checkpoints
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder, a_job, a_spec
from harness.waiting import wait_until

from shared.config.refiners import RefinerSpec
from shared.config.step_schedules import StepSchedule
from shared.job import Job
from worker.engine.checkpoints.checkpoint import Checkpoint
from worker.engine.checkpoints.replay import Replay, ReplayFailed
from worker.engine.checkpoints.task_record import TaskRecord
from worker.engine.checks import resume_check
from worker.engine.engine import Engine
from worker.engine.protocol import CheckpointTaken, EngineEvent, ForwardDone
from worker.engine.remote import RemoteEngine
from worker.engine.scheduling import job_checkpoints

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]


@dataclass
class Asking(EventRecorder):
    """A recorder that asks for checkpoints after a forward."""

    ask: Callable[[], None] = lambda: None
    after: int = 2
    asked: bool = field(default=False)

    def on_event(self, event: EngineEvent) -> None:
        super().on_event(event)
        if isinstance(event, ForwardDone) and len(self.forwards) >= self.after and not self.asked:
            self.asked = True
            self.ask()


@pytest.mark.parametrize("factory", [Engine, RemoteEngine])
def test_checkpoints_are_taken_on_request_from_another_process_too(factory: Any, tiny_models: Path) -> None:
    recorder = Asking()
    harness = EngineHarness(a_spec(tiny_models / "sd"), recorder=recorder, factory=factory)
    recorder.ask = lambda: harness.engine.take_checkpoints("one", "two", "unknown")
    jobs = [a_job("one", steps=40, n=2), a_job("two", steps=40)]
    harness.submit(*jobs, checkpoint_s=math.inf)
    with harness.started():
        harness.recorder.wait_for(["one", "two"])
    taken = {event.claim_key: event for event in recorder.checkpoints}
    assert list(taken) == ["one", "two"]
    for job in jobs:
        again = EngineHarness(a_spec(tiny_models / "sd")).run(job, checkpoints=files_of(taken[job.id]))
        steps = sum(image.step for image in taken[job.id].images if image is not None)
        assert again.finished[job.id].resumed_steps == steps >= 2 * job.n
        for key, image in again.images.items():
            assert np.abs(image.astype(int) - recorder.images[key]).max() <= 1


@pytest.mark.parametrize("factory", [Engine, RemoteEngine])
def test_a_job_that_is_handed_over_runs_no_further_step(factory: Any, tiny_models: Path) -> None:
    recorder = Asking()
    harness = EngineHarness(a_spec(tiny_models / "sd"), recorder=recorder, factory=factory)
    recorder.ask = lambda: harness.engine.hand_over("one", "unknown")
    job = a_job("one", steps=40)
    harness.submit(job, a_job("two", steps=60), checkpoint_s=math.inf)
    with harness.started():
        recorder.wait_for(["one", "two"])
    [taken] = recorder.checkpoints
    assert (taken.claim_key, taken.reason) == ("one", None)
    assert recorder.finished["one"].canceled
    assert not recorder.finished["two"].canceled
    [image] = taken.images
    assert image is not None
    assert recorder.finished["one"].batching.forwards == image.step
    again = EngineHarness(a_spec(tiny_models / "sd")).run(job, checkpoints=files_of(taken))
    assert len(again.forwards) == 40 - image.step


def test_a_job_is_handed_over_at_its_last_step_while_an_earlier_checkpoint_is_written(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that is asked twice, as for a pause at each renewal of the lease."""
    recorder, is_asked = Asking(), threading.Event()
    harness = EngineHarness(a_spec(tiny_models / "sd"), recorder=recorder)
    write = job_checkpoints.write

    def write_later(*args: Any) -> bytes:
        assert is_asked.wait(30)
        return write(*args)

    def hand_over() -> None:
        for _ in range(2):
            harness.engine.hand_over("one")
        is_asked.set()

    def take_one() -> None:
        harness.engine.take_checkpoints("one")
        recorder.ask, recorder.after, recorder.asked = hand_over, 6, False

    monkeypatch.setattr(job_checkpoints, "write", write_later)
    recorder.ask = take_one
    harness.submit(a_job("one", steps=40), checkpoint_s=math.inf)
    with harness.started():
        recorder.wait_for(["one"])
    earlier, last = (event.images[0].step for event in recorder.checkpoints if event.images[0] is not None)
    assert recorder.finished["one"].canceled
    assert earlier < last == recorder.finished["one"].batching.forwards


def test_a_job_that_has_not_started_is_canceled_when_it_is_handed_over(tiny_models: Path) -> None:
    harness = EngineHarness(a_spec(tiny_models / "sd"), fresh=("tiny",))
    harness.submit(a_job("one"), checkpoint_s=math.inf)
    harness.engine.hand_over("one")
    with harness.started():
        harness.recorder.wait_for(["one"])
    assert harness.recorder.finished["one"].canceled
    assert harness.recorder.forwards == harness.recorder.checkpoints == []


def test_a_job_that_can_have_no_checkpoint_runs_on_when_it_is_handed_over(tiny_models: Path) -> None:
    recorder = Asking()
    harness = EngineHarness(a_spec(tiny_models / "sd"), recorder=recorder)
    recorder.ask = lambda: harness.engine.hand_over("one")
    harness.run(a_job("one", steps=30))
    assert not recorder.finished["one"].canceled
    assert [event.reason for event in recorder.checkpoints] == ["its request has no checkpoint_s"]


def test_a_job_that_has_not_started_gets_an_event_without_images(tiny_models: Path) -> None:
    """The worker that asks waits for it."""
    harness = EngineHarness(a_spec(tiny_models / "sd"), fresh=("tiny",))
    harness.submit(a_job("one"), checkpoint_s=math.inf)
    harness.engine.take_checkpoints("one")
    with harness.started():
        harness.recorder.wait_for(["one"])
    assert harness.recorder.checkpoints == [CheckpointTaken("one")]


def test_a_job_that_is_shorter_than_its_checkpoint_s_gets_none(tiny_models: Path) -> None:
    assert EngineHarness(a_spec(tiny_models / "sd")).run(a_job("one"), checkpoint_s=1000.0).checkpoints == []


def test_there_is_one_checkpoint_for_each_checkpoint_s_of_device_time(tiny_models: Path) -> None:
    """The time counts from the last one."""
    recorder = run_with_checkpoints(a_spec(tiny_models / "sd"), a_job("one", steps=40), checkpoint_s=0.02)
    times = [event.device_seconds for event in recorder.checkpoints]
    assert times
    assert all(later - earlier >= 0.02 for earlier, later in zip([0.0, *times], times, strict=False))
    steps = [event.images[0].step for event in recorder.checkpoints if event.images[0] is not None]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize(
    ("fields", "request_fields", "reason"),
    [
        ({}, {}, "its request has no checkpoint_s"),
        (
            {"reproducible": True, "step_cache": StepSchedule(every=2), "steps": 12},
            {"checkpoint_s": math.inf},
            "step caching computes its first steps after a checkpoint again, which reproducible jobs must not",
        ),
    ],
)
def test_a_job_without_checkpoints_says_why(
    fields: dict[str, Any], request_fields: dict[str, Any], reason: str, tiny_models: Path
) -> None:
    recorder = Asking()
    harness = EngineHarness(a_spec(tiny_models / "sd"), recorder=recorder)
    recorder.ask = lambda: harness.engine.take_checkpoints("one")
    harness.run(a_job("one", **({"steps": 30} | fields)), **request_fields)
    assert [(event.images, event.reason) for event in recorder.checkpoints] == [((None,), reason)]


def test_a_refined_job_has_no_checkpoints(tiny_models: Path, tiny_model: Callable[[str], Path]) -> None:
    recorder = Asking()
    spec = a_spec(tiny_models / "sdxl", refiner=RefinerSpec(source=str(tiny_model("sdxl-refiner"))))
    harness = EngineHarness(spec, recorder=recorder)
    recorder.ask = lambda: harness.engine.take_checkpoints("one")
    harness.run(a_job("one", steps=30, refiner_start=0.8), checkpoint_s=math.inf)
    reasons = [(event.images, event.reason) for event in recorder.checkpoints]
    assert reasons == [((None,), "its refiner makes the last steps in a call of its own")]


def whole_and_file(spec: Any, job: Job) -> tuple[EventRecorder, tuple[bytes | None, ...]]:
    whole = run_with_checkpoints(spec, job)
    return whole, files_of(halfway(whole))


def test_a_job_with_the_checkpoint_of_another_begins_anew(tiny_models: Path) -> None:
    spec = a_spec(tiny_models / "sd")
    _, files = whole_and_file(spec, a_job("other"))
    plain = EngineHarness(spec).run(a_job("one"))
    recorder = EngineHarness(spec).run(a_job("one"), checkpoints=files)
    assert recorder.finished["one"].resumed_steps == 0
    assert np.array_equal(recorder.images["one", 0], plain.images["one", 0])


@pytest.mark.parametrize("error", [ReplayFailed("it is another call"), RuntimeError("zeros are not for me")])
def test_an_image_whose_call_does_not_follow_its_checkpoint_begins_anew(
    error: Exception, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, job = a_spec(tiny_models / "sd"), a_job("one", steps=6)
    whole, files = whole_and_file(spec, job)

    def fail(self: Replay, at: int, method: str) -> Any:
        if at == 2:
            raise error
        return output(self, at, method)

    output = Replay.output
    monkeypatch.setattr(Replay, "output", fail)
    recorder = EngineHarness(spec).run(job, checkpoints=files)
    assert recorder.finished["one"].error is None
    assert recorder.finished["one"].resumed_steps == 0
    assert len(recorder.forwards) == 6
    assert [entry[2:] for entry in recorder.log if entry[0] == "progress"][-1] == (6, 6)
    assert np.array_equal(recorder.images["one", 0], whole.images["one", 0])


def test_previews_before_the_checkpoint_are_not_repeated(tiny_models: Path) -> None:
    spec, job = a_spec(tiny_models / "sd"), a_job("one", steps=8, previews=3)
    whole, files = whole_and_file(spec, job)
    again = EngineHarness(spec).run(job, checkpoints=files)
    assert len(whole.previews) == 3
    assert len(again.previews) == 1
    assert np.array_equal(again.previews[0], whole.previews[2])


def test_step_caching_goes_on_with_a_computed_step(tiny_models: Path) -> None:
    outcome = resumed(a_spec(tiny_models / "sd"), a_job("one", steps=20, step_cache=StepSchedule(every=2)))
    assert outcome.resumed.finished["one"].batching.skipped_steps > 0
    assert outcome.difference <= 8
    assert outcome.resumed.finished["one"].resumed_steps == 10


def test_a_reproducible_image_continues_bit_for_bit_with_batch_mates(tiny_models: Path) -> None:
    spec, job = a_spec(tiny_models / "sd"), a_job("one", steps=6, reproducible=True)
    whole, files = whole_and_file(spec, job)
    harness = EngineHarness(spec)
    harness.submit(a_job("mate", steps=8, reproducible=True))
    harness.submit(job, checkpoints=files)
    with harness.started():
        harness.recorder.wait_for(["one", "mate"])
    assert harness.recorder.finished["one"].batching.max_jobs == 2
    assert np.array_equal(harness.recorder.images["one", 0], whole.images["one", 0])


def test_an_image_that_continued_has_checkpoints_like_any_other(tiny_models: Path) -> None:
    spec, job = a_spec(tiny_models / "sd"), a_job("one", steps=8)
    whole, files = whole_and_file(spec, job)
    second = run_with_checkpoints(spec, job, checkpoints=files)
    last = next(event for event in second.checkpoints if event.images[0] is not None and event.images[0].step == 6)
    third = EngineHarness(spec).run(job, checkpoints=files_of(last))
    assert third.finished["one"].resumed_steps == 6
    assert len(third.forwards) == 2
    assert np.array_equal(third.images["one", 0], whole.images["one", 0])


def test_a_canceled_job_reports_no_checkpoint_after_its_end(tiny_models: Path) -> None:
    recorder = Asking()
    harness = EngineHarness(a_spec(tiny_models / "sd"), recorder=recorder)

    def ask() -> None:
        harness.engine.take_checkpoints("one")
        harness.engine.cancel("one")

    recorder.ask = ask
    harness.submit(a_job("one", steps=50), checkpoint_s=math.inf)
    with harness.started() as engine:
        recorder.wait_for(["one"])
        wait_until(lambda: not engine.status().activity.busy, "the engine is idle")
    assert recorder.checkpoints == []


def test_a_job_whose_checkpoint_cannot_be_taken_runs_on(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a pipeline keeps may raise when it is copied."""
    spec = a_spec(tiny_models / "sd")
    monkeypatch.setattr(job_checkpoints.JobCheckpoints, "_fault", lambda *_: None)

    def fail(_record: TaskRecord) -> Checkpoint:
        raise AttributeError("no such state")

    monkeypatch.setattr(TaskRecord, "take", fail)
    recorder = run_with_checkpoints(spec, a_job("one", steps=4))
    assert recorder.finished["one"].error is None
    reasons = {event.reason for event in recorder.checkpoints}
    assert reasons == {"its checkpoint cannot be taken: AttributeError: no such state"}


def test_a_checkpoint_that_cannot_be_written_is_reported_without_images(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that drains waits for the event."""

    def fail(*_arguments: Any) -> bytes:
        raise MemoryError("no room")

    monkeypatch.setattr(job_checkpoints, "write", fail)
    recorder = run_with_checkpoints(a_spec(tiny_models / "sd"), a_job("one", steps=4))
    taken = next(event for event in recorder.checkpoints if event.reason is not None)
    assert (taken.claim_key, taken.images) == ("one", ())
    assert taken.reason == "its checkpoint cannot be written: MemoryError: no room"


def test_a_check_without_memory_leaves_no_unchecked_checkpoints_and_is_not_repeated_at_once(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = []

    def fail(*_arguments: Any) -> None:
        checks.append(1)
        raise MemoryError

    monkeypatch.setattr(resume_check, "_run", fail)
    recorder = run_with_checkpoints(a_spec(tiny_models / "sd"), a_job("one", steps=6), fresh=("tiny",))
    assert len(recorder.checkpoints) > 2
    assert {event.reason for event in recorder.checkpoints} == {"there is no memory for the check of its checkpoints"}
    assert not any(image for event in recorder.checkpoints for image in event.images)
    assert len(checks) == 1


def test_a_finished_image_of_a_job_computes_no_step_again(tiny_models: Path) -> None:
    """The others go on; the finished one is decoded again from its last step."""
    spec, job = a_spec(tiny_models / "sd", max_batch=1), a_job("one", steps=4, n=3)
    whole = run_with_checkpoints(spec, job)
    steps = [tuple(0 if image is None else image.step for image in event.images) for event in whole.checkpoints]
    at = next(at for at, (first, *others) in enumerate(steps) if first == 4 and 0 < sum(others) < 8)
    again = EngineHarness(spec).run(job, checkpoints=files_of(whole.checkpoints[at]))
    assert again.finished["one"].resumed_steps == sum(steps[at])
    assert len(again.forwards) == 12 - sum(steps[at])
    assert all(np.array_equal(image, whole.images[key]) for key, image in again.images.items())
