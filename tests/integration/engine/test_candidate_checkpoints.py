"""Jobs with candidates continue from their checkpoints, and keep the images that they would have kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.checkpoints import files_of, run_with_checkpoints
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder, a_job, a_spec
from harness.scorers import save_scorer
from structlog.testing import capture_logs

from shared.config.candidates import BestOf, DroppedCandidate, ScorerSpec
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.job import Job
from worker.engine.protocol import CheckpointTaken

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

DEMO = Path(__file__).resolve().parents[3] / "demo" / "model"
STEPS = 6
THREE_OF_EIGHT = BestOf(candidates=8, keep=3, at=(0.34, 0.84))  # 5 go on after 2 of 6 steps, 3 after 5


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    scorer = ScorerSpec(source=str(save_scorer(tmp_path_factory.mktemp("scorer"))))
    return a_spec(DEMO, limits=Limits(multiple_of=16, max_images=8), scorer=scorer)


def a_contest(best_of: BestOf, **fields: Any) -> Job:
    values = {"prompt": "a red circle", "steps": STEPS, "best_of": best_of, "n": best_of.keep, **fields}
    return a_job("contest", **values)


def outcome(recorder: EventRecorder, job: Job) -> tuple[list[tuple[int | None, float | None]], list[DroppedCandidate]]:
    finished = recorder.finished[job.id]
    assert finished.error is None
    outputs = [recorder.outputs[job.id, index] for index in range(job.n)]
    return [(one.candidate, one.score) for one in outputs], list(finished.batching.dropped)


def same_bits(one: EventRecorder, other: EventRecorder) -> bool:
    assert one.images.keys() == other.images.keys()
    return all(np.array_equal(image, other.images[key]) for key, image in one.images.items())


def steps_in(event: CheckpointTaken) -> list[int]:
    return [0 if image is None else image.step for image in event.images]


def steps_of(event: CheckpointTaken) -> int:
    return sum(steps_in(event))


def distinct(recorder: EventRecorder) -> list[CheckpointTaken]:
    """Return the checkpoints in which something differs from the one before."""
    events, last = list[CheckpointTaken](), None
    for event in recorder.checkpoints:
        if any(event.images) and files_of(event) != last:
            events.append(event)
            last = files_of(event)
    return events


@pytest.mark.parametrize(
    "best_of", [BestOf(candidates=4, keep=1, at=(0.4, 0.6)), BestOf(candidates=3, keep=2, at=(1.0,))]
)
def test_a_job_keeps_the_same_images_wherever_it_is_stopped(best_of: BestOf, spec: ModelSpec) -> None:
    """After each forward: also between a step and its score, and while some wait at a mark for the others."""
    job = a_contest(best_of, reproducible=True, steps=5)
    whole = run_with_checkpoints(spec, job)
    events = distinct(whole)
    assert len(events) > job.steps
    for event in events:
        again = EngineHarness(spec).run(job, checkpoints=files_of(event))
        assert outcome(again, job) == outcome(whole, job)
        assert same_bits(again, whole)
        assert again.finished[job.id].resumed_steps >= steps_of(event)


def test_a_job_that_has_continued_continues_again_with_the_marks_that_it_has_passed_since(spec: ModelSpec) -> None:
    """The candidates pass their last mark without a step of their own: each still has a file of that mark."""
    job = a_contest(BestOf(candidates=3, keep=2, at=(1.0,)), reproducible=True, steps=3)
    whole = run_with_checkpoints(spec, job)
    before_mark = next(event for event in whole.checkpoints if min(steps_in(event)) == 2)
    second = run_with_checkpoints(spec, job, checkpoints=files_of(before_mark))
    last = distinct(second)[-1]
    assert all(last.images)
    third = EngineHarness(spec).run(job, checkpoints=files_of(last))
    assert [entry[2] for entry in third.log if entry[0] == "dropped"] == [2]
    assert (outcome(third, job), third.rows) == (outcome(whole, job), [])
    assert same_bits(third, whole)


def after_first_mark(recorder: EventRecorder) -> CheckpointTaken:
    """Return the first checkpoint in which all candidates that were kept at the first mark are beyond it."""
    return next(event for event in recorder.checkpoints if min(sorted(steps_in(event))[3:]) > 2 <= min(steps_in(event)))


def test_dropped_candidates_do_not_run_again(spec: ModelSpec) -> None:
    job = a_contest(THREE_OF_EIGHT)
    whole = run_with_checkpoints(spec, job)
    event = after_first_mark(whole)
    again = EngineHarness(spec).run(job, checkpoints=files_of(event))
    assert whole.rows == [8, 8, 5, 5, 5, 3]
    assert again.rows == [5, 5, 3]
    assert [entry[2] for entry in again.log if entry[0] == "dropped"] == [5, 3]
    assert next(entry[2:] for entry in again.log if entry[0] == "progress") == (steps_of(event), 5 * 6 + 3 * 2)
    assert again.finished[job.id].resumed_steps == steps_of(event) == 3 * 5 + 2 * 3
    assert outcome(again, job)[1][:3] == outcome(whole, job)[1][:3]


@dataclass(frozen=True)
class Stopped:
    """A reproducible job, its run, its checkpoint after the first mark, and the candidate that is the best at last."""

    job: Job
    whole: EventRecorder
    event: CheckpointTaken
    best: int

    def continues(self, spec: ModelSpec, files: Sequence[bytes | None]) -> int:
        """Return how many steps the job computes from `files`, to the same outcome."""
        again = EngineHarness(spec).run(self.job, checkpoints=tuple(files))
        assert outcome(again, self.job) == outcome(self.whole, self.job)
        assert same_bits(again, self.whole)
        computed = sum(again.rows)
        assert computed == sum(self.whole.rows) - again.finished[self.job.id].resumed_steps
        return computed


@pytest.fixture(scope="module")
def stopped(spec: ModelSpec) -> Stopped:
    job = a_contest(THREE_OF_EIGHT, reproducible=True)
    whole = run_with_checkpoints(spec, job)
    best = whole.outputs[job.id, 0].candidate
    assert best is not None
    return Stopped(job, whole, after_first_mark(whole), best)


def test_a_candidate_without_its_checkpoint_begins_anew_and_passes_the_marks_that_are_past(
    spec: ModelSpec, stopped: Stopped
) -> None:
    files = files_of(stopped.event)
    without = [None if index == stopped.best else file for index, file in enumerate(files)]
    assert stopped.continues(spec, without) >= stopped.continues(spec, files) + 3


def test_a_checkpoint_of_other_marks_than_the_others_is_refused(spec: ModelSpec, stopped: Stopped) -> None:
    """Such as one that an earlier run has left; of those of the last mark, dropped candidates stay dropped."""
    earlier = next(event for event in stopped.whole.checkpoints if min(steps_in(event)) == 1)
    outdated = {stopped.best, *(one.candidate for one in outcome(stopped.whole, stopped.job)[1][:3])}
    files = [files_of(earlier if index in outdated else stopped.event)[index] for index in range(8)]
    with capture_logs() as logs:
        computed = stopped.continues(spec, files)
    refused = [(entry["image"], entry["reason"]) for entry in logs if entry["event"] == "checkpoint_refused"]
    assert refused == [(stopped.best, "the checkpoint has other marks than that of another candidate")]
    assert computed >= STEPS
