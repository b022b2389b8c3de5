"""Continuous batching: jobs join and leave running batches without any effect on the images."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.engine import TIMEOUT_S, EngineHarness, EventRecorder, a_job, a_spec
from harness.waiting import wait_until

from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.job import Job
from shared.job_fields import Priority
from worker.engine.engine_status import Activity
from worker.engine.fusion.image_task import ImageTask
from worker.engine.protocol import EngineEvent, JobProgress
from worker.engine.scheduling.selection import CallSelector, TaskCall

pytestmark = pytest.mark.usefixtures("shared_models")

DEMO = Path(__file__).resolve().parents[3] / "demo" / "model"
BATCHES = 4


def solo(folder: Path, job: Job) -> dict[int, np.ndarray]:
    recorder = EngineHarness(a_spec(folder)).run(job)
    return {index: pixels for (_, index), pixels in recorder.images.items()}


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return int(np.abs(one.astype(int) - other.astype(int)).max()) <= 1


class ScriptedRecorder(EventRecorder):
    """A recorder that runs actions on the engine's thread once a job has reached a step."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: dict[str, tuple[int, Callable[[], None]]] = {}

    def at(self, key: str, step: int, action: Callable[[], None]) -> None:
        self.actions[key] = (step, action)

    def on_event(self, event: EngineEvent) -> None:
        super().on_event(event)
        if isinstance(event, JobProgress):
            step, action = self.actions.get(event.claim_key, (event.total + 1, None))
            if event.step >= step and action is not None:
                del self.actions[event.claim_key]
                action()


class ScriptedHarness(EngineHarness):
    """An engine harness with a scripted recorder."""

    def __init__(self, *specs: ModelSpec, **settings: Any) -> None:
        self.script = ScriptedRecorder()
        super().__init__(*specs, recorder=self.script, **settings)


def test_a_cached_text_needs_no_forward(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image task reaches the denoiser at once."""
    selected: list[tuple[str, str]] = []
    select = CallSelector.select

    def record(self: CallSelector, engine_jobs: Any) -> list[TaskCall]:
        task_calls = select(self, engine_jobs)
        selected.extend((one.engine_job.claim_key, one.parked_call.shared_method.name) for one in task_calls)
        return task_calls

    monkeypatch.setattr(CallSelector, "select", record)
    first, again = a_job("first", prompt="a dog"), a_job("again", prompt="a dog", seed=7)
    harness = ScriptedHarness(a_spec(tiny_models / "sd"))
    harness.script.at("first", 2, lambda: harness.submit_prepared(again))
    harness.submit(first)
    with harness.started():
        harness.recorder.wait_for(["first", "again"])

    assert ("first", "text_encoder.forward") in selected
    assert ("again", "text_encoder.forward") not in selected
    assert same(harness.recorder.images["again", 0], solo(tiny_models / "sd", again)[0])


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_a_job_joins_a_running_batch_at_its_next_step(family: str, tiny_models: Path) -> None:
    """The new job shares every forward from its arrival on, at any step of the others."""
    folder = tiny_models / family
    first, late = a_job("first", steps=8), a_job("late", steps=4, strength=1.0)
    harness = ScriptedHarness(a_spec(folder))
    harness.script.at("first", 3, lambda: harness.submit_prepared(late))
    harness.submit(first)
    with harness.started():
        harness.recorder.wait_for(["first", "late"])

    assert harness.recorder.rows == [1, 1, 1, 2, 2, 2, 2, 1]
    for job in (first, late):
        assert same(harness.recorder.images[job.id, 0], solo(folder, job)[0])


def test_sixteen_jobs_that_join_at_random_steps_get_the_same_images_as_solo(tiny_models: Path) -> None:
    """Jobs can join and leave at every step."""
    rng = random.Random(5)
    folder = tiny_models / "sd"
    jobs = [
        a_job(
            f"job{at}",
            steps=rng.randint(2, 7),
            guidance_scale=rng.choice([1.0, 3.0, 8.0]),
            n=rng.choice([1, 1, 2]),
        )
        for at in range(16)
    ]
    harness = ScriptedHarness(a_spec(folder, max_batch=6))
    for earlier, job in pairwise(jobs):
        harness.script.at(earlier.id, rng.randint(1, earlier.steps) * earlier.n, lambda job=job: harness.submit(job))
    harness.submit(jobs[0])
    with harness.started():
        harness.recorder.wait_for([job.id for job in jobs])
    recorder = harness.recorder
    assert sum(recorder.rows) == sum(job.steps * job.n for job in jobs), "no step is repeated"
    mean_rows = sum(recorder.rows) / len(recorder.rows)
    assert 2 < mean_rows <= 6, f"{mean_rows:.2f} rows per forward"
    for stats in (recorder.finished[job.id].batching for job in jobs):
        assert sum(times for _, times in stats.rows_by_forward) == stats.forwards
        rows = sum(rows * times for rows, times in stats.rows_by_forward)
        assert rows / stats.forwards == pytest.approx(stats.mean_rows, abs=0.01)
    separate = EngineHarness(a_spec(folder))
    with separate.started():
        for job in jobs:
            separate.submit(job)
            separate.recorder.wait_for([job.id])
    assert max(forward.jobs for forward in separate.recorder.forwards) == 1
    assert all(same(recorder.images[key], expected) for key, expected in separate.recorder.images.items())


def test_a_cancel_takes_effect_at_the_next_step_and_disturbs_no_other_job(tiny_models: Path) -> None:
    """The canceled job has no image; the other one finishes as if solo."""
    folder = tiny_models / "sd"
    stays, leaves = a_job("stays", steps=6), a_job("leaves", steps=6)
    harness = ScriptedHarness(a_spec(folder))
    harness.script.at("leaves", 2, lambda: harness.engine.cancel("leaves"))
    recorder = harness.run(stays, leaves)

    assert recorder.finished["leaves"].canceled
    assert recorder.finished["leaves"].error is None
    assert ("leaves", 0) not in recorder.images
    assert recorder.rows in ([2, 2, 1, 1, 1, 1], [2, 2, 2, 1, 1, 1])
    assert same(recorder.images["stays", 0], solo(folder, stays)[0])


def test_a_job_can_be_canceled_before_it_starts(tiny_models: Path) -> None:
    """A cancel can arrive before the job's input image is decoded."""
    harness = EngineHarness(a_spec(tiny_models / "sd"))
    harness.submit(a_job("gone", strength=0.5))
    harness.engine.cancel("gone")
    harness.engine.cancel("unknown")
    with harness.started():
        harness.recorder.wait_for(["gone"])
    assert harness.recorder.finished["gone"].canceled
    assert not harness.engine.status().activity.busy


def test_an_interactive_job_preempts_bulk_rows_which_resume(tiny_models: Path) -> None:
    """It starts at the next step of a full batch; the bulk jobs repeat no step and get the same images."""
    folder = tiny_models / "sd"
    bulk = [a_job(f"bulk{at}", steps=6, priority=Priority.BULK) for at in range(2)]
    interactive = a_job("interactive", steps=3, priority=Priority.INTERACTIVE)
    harness = ScriptedHarness(a_spec(folder, max_batch=2))
    harness.script.at("bulk0", 2, lambda: harness.submit(interactive))
    harness.submit(*bulk)
    with harness.started():
        harness.recorder.wait_for(["bulk0", "bulk1", "interactive"])
    recorder = harness.recorder

    ends = [entry[1] for entry in recorder.log if entry[0] == "output"]
    assert ends == ["interactive", "bulk0", "bulk1"]
    assert sum(recorder.rows) == 6 + 6 + 3
    for job in (*bulk, interactive):
        assert same(recorder.images[job.id, 0], solo(folder, job)[0])


def test_a_job_of_more_images_than_max_batch_runs_in_parts(tiny_models: Path) -> None:
    """Its model's `max_batch` was lowered while it was queued; its images stay the same."""
    job = a_job("large", n=5, steps=2)
    harness = EngineHarness(a_spec(tiny_models / "sd", max_batch=2, limits=Limits(max_images=1)))
    recorder = harness.run(job)
    assert max(recorder.rows) == 2
    whole = solo(tiny_models / "sd", job)
    assert len(whole) == 5
    assert all(same(recorder.images["large", index], pixels) for index, pixels in whole.items())


def test_bulk_jobs_do_not_slow_an_interactive_job_down_for_free_slots(tiny_models: Path) -> None:
    """Bulk jobs wait until their cost is known; standard jobs share its forwards."""
    harness = ScriptedHarness(a_spec(tiny_models / "sd"))
    arrivals = [("interactive", Priority.INTERACTIVE), ("standard", Priority.STANDARD)]
    late = [a_job(name, steps=3, priority=priority) for name, priority in arrivals]
    harness.script.at("bulk0", 2, lambda: harness.submit(*late))
    bulk = [a_job(f"bulk{at}", steps=6, priority=Priority.BULK) for at in range(3)]
    harness.submit(*bulk)
    with harness.started():
        harness.recorder.wait_for([job.id for job in (*bulk, *late)])
    assert harness.recorder.rows[:3] == [3, 3, 2]
    assert harness.recorder.forwards[2].claim_key == "interactive"
    assert sum(harness.recorder.rows) == 3 * 6 + 2 * 3


@pytest.mark.parametrize(
    ("steps", "priority", "max_batch", "decoded"),
    [
        pytest.param((4, 4, 8), Priority.STANDARD, 8, [["0", "1"], ["2"]], id="at the same step"),
        pytest.param((4, 4, 4), Priority.STANDARD, 2, [["0", "1"], ["2"]], id="at most max_batch"),
        pytest.param((4, 5, 8), Priority.STANDARD, 8, [["0"], ["1"], ["2"]], id="steps apart"),
        pytest.param((4, 4, 8), Priority.INTERACTIVE, 8, [["0", "1"], ["2"]], id="interactive"),
    ],
)
def test_images_that_finish_together_are_decoded_together(
    steps: Sequence[int], priority: Priority, max_batch: int, decoded: list[list[str]], tiny_models: Path
) -> None:
    """A finished image does not wait for the next one."""
    folder = tiny_models / "sd"
    jobs = [a_job(str(at), steps=count, priority=priority) for at, count in enumerate(steps)]
    harness = EngineHarness(a_spec(folder, max_batch=max_batch))
    harness.submit(*jobs)
    with harness.started():
        harness.recorder.wait_for([job.id for job in jobs])
    events = [(kind, key) for kind, key, *_ in harness.recorder.log if kind in ("decoding", "output")]
    assert events == [(kind, key) for keys in decoded for kind in ("decoding", "output") for key in keys]
    for job in jobs:
        assert same(harness.recorder.images[job.id, 0], solo(folder, job)[0])


def test_decoding_does_not_wait_for_jobs_with_steps_left(tiny_models: Path) -> None:
    harness = EngineHarness(a_spec(tiny_models / "sd"))
    harness.submit(a_job("of2", steps=2), a_job("of4", steps=4))
    with harness.started():
        harness.recorder.wait_for(["of2", "of4"])
    events = harness.recorder.log
    assert events.index(("decoding", "of2")) < events.index(("progress", "of4", 3, 4))


def test_a_stream_of_interactive_jobs_does_not_starve_a_bulk_job(tiny_models: Path) -> None:
    """After the aging time it counts as interactive, and runs until it is done as the oldest of them."""
    stream = [a_job(f"interactive{at}", steps=3, priority=Priority.INTERACTIVE) for at in range(200)]
    harness = ScriptedHarness(a_spec(tiny_models / "sd", max_batch=1), aging_ms=50)
    for job, following in pairwise(stream):

        def submit_next(job: Job = following) -> None:
            if "bulk" not in harness.recorder.finished:
                harness.submit(job)

        harness.script.at(job.id, 1, submit_next)
    harness.script.at("bulk", 2, lambda: harness.submit(stream[0]))
    harness.submit(a_job("bulk", steps=20, priority=Priority.BULK))
    with harness.started():
        harness.recorder.wait_for(["bulk"])
    order = [forward.claim_key for forward in harness.recorder.forwards]
    assert order[:3] == ["bulk", "bulk", "interactive0"], "it was preempted at once"
    assert order.count("bulk") == 20
    assert len(harness.recorder.finished) < len(stream) / 2, "the bulk job ran only after the stream"


def test_jobs_that_cannot_be_batched_run_one_after_the_other_by_age(tiny_models: Path) -> None:
    """Running two sizes in turns would delay both; the older job finishes first."""
    harness = EngineHarness(a_spec(tiny_models / "sd"))
    recorder = harness.run(a_job("wide", width=96), a_job("square"), a_job("wide-too", width=96))
    assert [entry[1] for entry in recorder.log if entry[0] == "output"] == ["wide", "wide-too", "square"]
    assert recorder.finished["square"].batching.solo_reason == "no other job arrived in time"
    assert recorder.finished["wide"].batching.max_jobs == 2


def test_a_job_that_was_lost_once_runs_solo_with_a_reason(tiny_models: Path) -> None:
    """If it ends the process again, no other job is lost."""
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(
        a_job("suspect"), a_job("one"), a_job("two"), solo=["suspect"]
    )
    assert recorder.finished["suspect"].batching.max_jobs == 1
    assert recorder.finished["suspect"].batching.solo_reason == "ran solo because a worker was lost while running it"
    assert recorder.finished["one"].batching.max_jobs == 2
    assert recorder.finished["one"].batching.solo_reason is None


def test_release_all_cancels_all_jobs_at_once(tiny_models: Path) -> None:
    """At the drain timeout the jobs are released; the engine accepts new jobs afterwards."""
    harness = ScriptedHarness(a_spec(tiny_models / "sd"))
    harness.script.at("one", 1, harness.engine.release_all)
    recorder = harness.run(a_job("one", steps=50), a_job("two", steps=50))
    assert recorder.finished["one"].canceled
    assert recorder.finished["two"].canceled
    assert recorder.images == {}


def test_stop_ends_the_thread_between_two_forwards(tiny_models: Path) -> None:
    """Stopping waits for the present forward, not for the jobs."""
    harness = ScriptedHarness(a_spec(tiny_models / "sd"))
    running = threading.Event()

    def await_stop() -> None:
        running.set()
        wait_until(lambda: not harness.engine._inbox.empty(), "the stop arrives", TIMEOUT_S)

    harness.script.at("long", 1, await_stop)
    harness.submit(a_job("long", steps=500))
    with harness.started() as engine:
        assert running.wait(TIMEOUT_S)
        assert engine.status().activity.busy
    assert engine.join(0)
    assert harness.recorder.finished["long"].canceled
    assert harness.recorder.rows == [1]


def test_the_first_job_after_a_long_idle_time_does_not_look_hung(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The idle time before the job does not count as a time without progress."""
    harness = EngineHarness(a_spec(tiny_models / "sd"))
    seen: list[Activity] = []
    start = ImageTask.start

    def record_and_start(self: ImageTask, device: torch.device) -> None:
        seen.append(harness.engine.status().activity)
        start(self, device)

    monkeypatch.setattr(ImageTask, "start", record_and_start)
    with harness.started() as engine:
        engine.warm_up()
        harness.submit(a_job("before"))
        harness.recorder.wait_for(["before"])
        wait_until(lambda: not engine._thread_timer.busy, "the thread is idle")
        engine._forward_timer.last_progress_s -= 3600.0
        submitted_s = time.monotonic()
        harness.submit(a_job("after"))
        harness.recorder.wait_for(["after"])
    assert (seen[-1].busy, seen[-1].since_s >= submitted_s) == (True, True)


def test_progress_covers_all_images_in_order(tiny_models: Path) -> None:
    """Loading, every step of both images, decoding, then the images."""
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(a_job("pair", n=2, steps=3))
    kinds = [entry[0] for entry in recorder.log]
    assert kinds == ["loading", *["progress"] * (len(kinds) - 4), "decoding", "output", "output"]
    steps = [(step, total) for kind, _, step, total in recorder.log[1:-3] if kind == "progress"]
    assert steps == sorted(steps)
    assert steps[-1] == (6, 6)
    assert {total for _, total in steps} == {6}
    batching = recorder.finished["pair"].batching
    assert (batching.forwards, batching.max_jobs, batching.mean_rows) == (3, 1, 2.0)
    assert batching.rows_by_forward == ((2, 3),)
    assert recorder.finished["pair"].device_seconds > 0
    assert recorder.finished["pair"].load_ms is not None


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "while the model loads"])
def test_the_device_seconds_of_all_jobs_are_the_busy_time_of_the_engine(warm: bool) -> None:
    """Encoding, denoising, decoding, the pipelines' own code and the selection of calls, of jobs that arrive and are
    canceled at any step: fused, padded and image-to-image ones, with previews. A tenant's usage is their sum."""
    harness = ScriptedHarness(a_spec(DEMO), fresh=() if warm else ("tiny",))
    kinds: list[dict[str, Any]] = [{}, {"n": 2, "steps": 6}, {"reproducible": True}, {"strength": 0.6}, {"previews": 2}]
    jobs = [a_job(f"{at}", prompt=f"{at // 2} circles", **kinds[at % len(kinds)]) for at in range(14)]
    for job, later in zip(jobs, jobs[7:], strict=False):
        harness.script.at(job.id, 2, lambda later=later: harness.submit(later))
    harness.script.at("11", 2, lambda: harness.engine.cancel("11"))
    with harness.started() as engine:
        if warm:
            engine.warm_up()
        harness.submit(*jobs[:7])
        harness.recorder.wait_for([job.id for job in jobs])
        wait_until(lambda: not engine._thread_timer.busy, "the thread is idle")
        busy_s = engine.status().thread_time.busy_s
    finished = harness.recorder.finished
    seconds = {name: ended.device_seconds for name, ended in finished.items()}
    assert sum(seconds.values()) == pytest.approx(busy_s, rel=0.01)
    assert finished["11"].canceled
    assert 0 < seconds["11"] < seconds["1"], "it ended early"
    forwards_s = sum(forward.seconds for forward in harness.recorder.forwards)
    assert forwards_s < sum(seconds.values()), "denoising is a part of it"


def test_the_device_times_of_a_job_hold_no_other_jobs(tiny_models: Path) -> None:
    """A preempted job counts only its own forwards; jobs that share theirs count all of each, and an image's share."""
    harness = ScriptedHarness(a_spec(tiny_models / "sd"))
    urgent = a_job("urgent", priority=Priority.INTERACTIVE, reproducible=True)
    harness.script.at("long", 2, lambda: harness.submit(urgent))
    with harness.started() as engine:
        engine.warm_up()
        harness.submit(a_job("long", priority=Priority.BULK, steps=6))
        harness.recorder.wait_for(["long", "urgent"])
        harness.submit(a_job("one"), a_job("other"))
        harness.recorder.wait_for(["one", "other"])
    finished = harness.recorder.finished
    times = {name: ended.device_times for name, ended in finished.items()}
    for name, steps, share in (("long", 6, 1.0), ("urgent", 4, 1.0), ("one", 4, 0.5)):
        assert (own := times[name]) is not None
        assert own.least_step_s is not None
        assert own.least_rest_s is not None
        assert own.run_s == pytest.approx(steps * own.step_s + own.rest_s)
        assert 0 < own.least_step_s <= share * own.step_s
        assert 0 < own.least_rest_s <= share * own.rest_s
        if share == 1.0:
            assert own.run_s == pytest.approx(finished[name].device_seconds, abs=1e-5)
        else:
            assert own.run_s > 1.2 * finished[name].device_seconds


def other_jobs(rng: random.Random, at: int) -> list[Job]:
    """Return jobs of random prompts, steps and guidance; most are reproducible, some start from an image."""
    jobs = []
    for other in range(rng.randint(1, 4)):
        more = {"strength": 0.6} if other and rng.random() < 0.2 else {}
        jobs.append(
            a_job(
                f"other{at}-{other}",
                prompt=" ".join(rng.choices(["a red", "circle", "on", "blue", "ground,", "left"], k=other + 1)),
                reproducible=rng.random() < 0.9,
                steps=rng.randint(2, 3),
                guidance_scale=rng.choice([1.0, 5.0]),
                **more,
            )
        )
    return jobs


@pytest.mark.parametrize("family", ["sd", pytest.param("sd3", marks=pytest.mark.slow), "demo"])
def test_reproducible_images_are_bit_identical_in_any_batch(family: str, tiny_models: Path) -> None:
    """Solo, or joining random batches at random steps."""
    rng = random.Random(3)
    spec = a_spec(DEMO if family == "demo" else tiny_models / family)
    job = a_job("exact", reproducible=True, steps=2)
    harness = ScriptedHarness(spec)
    with harness.started():
        harness.submit(job)
        harness.recorder.wait_for(["exact"])
        for at in range(BATCHES):
            others, mine = other_jobs(rng, at), job.model_copy(update={"id": f"exact{at}"})
            harness.script.at(
                others[0].id, rng.randint(1, others[0].steps), lambda mine=mine: harness.submit_prepared(mine)
            )
            harness.submit(*others)
            harness.recorder.wait_for([mine.id, *(other.id for other in others)])
    recorder = harness.recorder
    assert {name: ended.error for name, ended in recorder.finished.items() if ended.error} == {}
    differing = [
        at for at in range(BATCHES) if not np.array_equal(recorder.images[f"exact{at}", 0], recorder.images["exact", 0])
    ]
    assert differing == []
    assert sum(recorder.finished[f"exact{at}"].batching.max_jobs > 1 for at in range(BATCHES)) >= 2, (
        "too few batches were shared"
    )
