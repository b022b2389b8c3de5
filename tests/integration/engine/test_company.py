"""Jobs come and go while others run, and nobody's picture shows it."""

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
from harness.engine import TIMEOUT_S, Recorder, Room, a_job, a_spec
from harness.waiting import wait_until

from shared.config.models_file import ModelSpec
from shared.job import Job, Priority
from worker.engine import EngineEvent, JobProgress
from worker.engine.fusion.image_task import ImageTask
from worker.engine.protocol import Activity
from worker.engine.scheduling.selection import CallSelector, TaskCall

DEMO = Path(__file__).resolve().parents[3] / "demo" / "model"


def solo(folder: Path, job: Job) -> dict[int, np.ndarray]:
    heard = Room(a_spec(folder)).run(job)
    return {index: pixels for (_, index), pixels in heard.pictures.items()}


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return int(np.abs(one.astype(int) - other.astype(int)).max()) <= 1


class Script(Recorder):
    """A listener that acts once a job has come to a step, on the engine's thread: as early as anyone could."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: dict[str, tuple[int, Callable[[], None]]] = {}

    def at(self, key: str, step: int, action: Callable[[], None]) -> None:
        self.actions[key] = (step, action)

    def on_event(self, event: EngineEvent) -> None:
        super().on_event(event)
        if isinstance(event, JobProgress):
            due, action = self.actions.get(event.claim_key, (event.total + 1, None))
            if event.step >= due and action is not None:
                del self.actions[event.claim_key]
                action()


class Stage(Room):
    """A room whose listener is a script."""

    def __init__(self, *specs: ModelSpec, **settings: Any) -> None:
        self.script = Script()
        super().__init__(*specs, recorder=self.script, **settings)


def test_a_text_that_is_known_takes_no_round(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever brings it goes on to the denoiser at once."""
    chosen: list[tuple[str, str]] = []
    select = CallSelector.select

    def record(self: CallSelector, jobs: Any) -> list[TaskCall]:
        calls = select(self, jobs)
        chosen.extend((call.job.key, call.call.shared_method.name) for call in calls)
        return calls

    monkeypatch.setattr(CallSelector, "select", record)
    first, again = a_job("first", prompt="a dog"), a_job("again", prompt="a dog", seed=7)
    room = Stage(a_spec(tiny_models / "sd"))
    room.script.at("first", 2, lambda: room.seat_now(again))
    room.seat(first)
    with room.started():
        room.recorder.wait_for(["first", "again"])

    assert ("first", "text_encoder.forward") in chosen
    assert ("again", "text_encoder.forward") not in chosen
    assert same(room.recorder.pictures["again", 0], solo(tiny_models / "sd", again)[0])


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_a_job_joins_a_running_batch_at_its_next_step(family: str, tiny_models: Path) -> None:
    """The newcomer shares every forward from its arrival on, whatever step the others are at."""
    folder = tiny_models / family
    first, late = a_job("first", steps=8), a_job("late", steps=4, strength=1.0)
    room = Stage(a_spec(folder))
    room.script.at("first", 3, lambda: room.seat_now(late))
    room.seat(first)
    with room.started():
        room.recorder.wait_for(["first", "late"])

    assert room.recorder.rows == [1, 1, 1, 2, 2, 2, 2, 1]
    for job in (first, late):
        assert same(room.recorder.pictures[job.id, 0], solo(folder, job)[0])


def test_sixteen_arrivals_at_random_steps_all_get_their_lone_pictures(tiny_models: Path) -> None:
    """Continuous batching at its busiest: every step somebody may come or go."""
    chance = random.Random(5)
    folder = tiny_models / "sd"
    jobs = [
        a_job(
            f"job{at}",
            steps=chance.randint(2, 7),
            guidance_scale=chance.choice([1.0, 3.0, 8.0]),
            n=chance.choice([1, 1, 2]),
        )
        for at in range(16)
    ]
    room = Stage(a_spec(folder, max_batch=6))
    for before, job in pairwise(jobs):
        room.script.at(before.id, chance.randint(1, before.steps) * before.n, lambda job=job: room.seat(job))
    room.seat(jobs[0])
    with room.started():
        room.recorder.wait_for([job.id for job in jobs])
    heard = room.recorder
    assert sum(heard.rows) == sum(job.steps * job.n for job in jobs), "no step is run twice"
    mean_rows = sum(heard.rows) / len(heard.rows)
    assert 2 < mean_rows <= 6, f"{mean_rows:.2f} rows a forward"
    apart = Room(a_spec(folder))
    with apart.started():
        for job in jobs:
            apart.seat(job)
            apart.recorder.wait_for([job.id])
    assert max(facts.jobs for facts in apart.recorder.facts) == 1
    assert all(same(heard.pictures[made], expected) for made, expected in apart.recorder.pictures.items())


def test_a_cancel_takes_effect_at_the_next_step_and_disturbs_nobody(tiny_models: Path) -> None:
    """The job that leaves is told canceled, without a picture; the others finish as if it had never been."""
    folder = tiny_models / "sd"
    stays, leaves = a_job("stays", steps=6), a_job("leaves", steps=6)
    room = Stage(a_spec(folder))
    room.script.at("leaves", 2, lambda: room.engine.cancel("leaves"))
    heard = room.run(stays, leaves)

    assert heard.ended["leaves"].canceled
    assert heard.ended["leaves"].error is None
    assert ("leaves", 0) not in heard.pictures
    assert heard.rows in ([2, 2, 1, 1, 1, 1], [2, 2, 2, 1, 1, 1])
    assert same(heard.pictures["stays", 0], solo(folder, stays)[0])


def test_canceling_before_a_job_has_begun_leaves_nothing_behind(tiny_models: Path) -> None:
    """A cancel that overtakes the decoding of the job's picture still ends it."""
    room = Room(a_spec(tiny_models / "sd"))
    room.seat(a_job("gone", strength=0.5))
    room.engine.cancel("gone")
    room.engine.cancel("never-heard-of")
    with room.started():
        room.recorder.wait_for(["gone"])
    assert room.recorder.ended["gone"].canceled
    assert not room.engine.status().activity.busy


def test_an_interactive_job_sets_bulk_rows_aside_and_they_resume(tiny_models: Path) -> None:
    """It starts at the next step of a full batch; the bulk job loses no step and gets the same picture."""
    folder = tiny_models / "sd"
    bulk = [a_job(f"bulk{at}", steps=6, priority=Priority.BULK) for at in range(2)]
    urgent = a_job("urgent", steps=3, priority=Priority.INTERACTIVE)
    room = Stage(a_spec(folder, max_batch=2))
    room.script.at("bulk0", 2, lambda: room.seat(urgent))
    room.seat(*bulk)
    with room.started():
        room.recorder.wait_for(["bulk0", "bulk1", "urgent"])
    heard = room.recorder

    ends = [entry[1] for entry in heard.heard if entry[0] == "picture"]
    assert ends == ["urgent", "bulk0", "bulk1"]
    assert sum(heard.rows) == 6 + 6 + 3
    for job in (*bulk, urgent):
        assert same(heard.pictures[job.id, 0], solo(folder, job)[0])


def test_free_seats_are_no_reason_to_slow_an_interactive_job_down(tiny_models: Path) -> None:
    """As long as nobody knows what company costs it has none of bulk jobs, and of standard ones as ever."""
    room = Stage(a_spec(tiny_models / "sd"))
    arrivals = [("urgent", Priority.INTERACTIVE), ("standard", Priority.STANDARD)]
    late = [a_job(name, steps=3, priority=priority) for name, priority in arrivals]
    room.script.at("bulk0", 2, lambda: room.seat(*late))
    bulk = [a_job(f"bulk{at}", steps=6, priority=Priority.BULK) for at in range(3)]
    room.seat(*bulk)
    with room.started():
        room.recorder.wait_for([job.id for job in (*bulk, *late)])
    assert room.recorder.rows[:3] == [3, 3, 2]
    assert room.recorder.facts[2].claim_key == "urgent"
    assert sum(room.recorder.rows) == 3 * 6 + 2 * 3


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
    room = Room(a_spec(folder, max_batch=max_batch))
    room.seat(*jobs)
    with room.started():
        room.recorder.wait_for([job.id for job in jobs])
    events = [(kind, key) for kind, key, *_ in room.recorder.heard if kind in ("decoding", "picture")]
    assert events == [(kind, key) for keys in decoded for kind in ("decoding", "picture") for key in keys]
    for job in jobs:
        assert same(room.recorder.pictures[job.id, 0], solo(folder, job)[0])


def test_decoding_does_not_wait_for_jobs_with_steps_left(tiny_models: Path) -> None:
    room = Room(a_spec(tiny_models / "sd"))
    room.seat(a_job("of2", steps=2), a_job("of4", steps=4))
    with room.started():
        room.recorder.wait_for(["of2", "of4"])
    events = room.recorder.heard
    assert events.index(("decoding", "of2")) < events.index(("progress", "of4", 3, 4))


def test_a_stream_of_interactive_jobs_does_not_starve_a_bulk_job(tiny_models: Path) -> None:
    """Set aside for long enough it counts as interactive itself, and as the oldest of them goes on to its end."""
    stream = [a_job(f"urgent{at}", steps=3, priority=Priority.INTERACTIVE) for at in range(200)]
    room = Stage(a_spec(tiny_models / "sd", max_batch=1), aging_ms=50)
    for at, after in pairwise(stream):

        def follow(job: Job = after) -> None:
            if "bulk" not in room.recorder.ended:
                room.seat(job)

        room.script.at(at.id, 1, follow)
    room.script.at("bulk", 2, lambda: room.seat(stream[0]))
    room.seat(a_job("bulk", steps=20, priority=Priority.BULK))
    with room.started():
        room.recorder.wait_for(["bulk"])
    order = [facts.claim_key for facts in room.recorder.facts]
    assert order[:3] == ["bulk", "bulk", "urgent0"], "it was set aside at once"
    assert order.count("bulk") == 20
    assert len(room.recorder.ended) < len(stream) / 2, "only the end of the stream let the bulk job go on"


def test_jobs_that_do_not_fit_run_one_after_the_other_by_age(tiny_models: Path) -> None:
    """Two sizes in turns would make both late; the older one ends first."""
    room = Room(a_spec(tiny_models / "sd"))
    heard = room.run(a_job("wide", width=96), a_job("square"), a_job("wide-too", width=96))
    assert [entry[1] for entry in heard.heard if entry[0] == "picture"] == ["wide", "wide-too", "square"]
    assert heard.ended["square"].batching.solo_reason == "no other job arrived in time"
    assert heard.ended["wide"].batching.max_jobs == 2


def test_a_job_that_was_lost_once_runs_without_company_and_says_why(tiny_models: Path) -> None:
    """Should it take the process down again, it takes nobody with it."""
    heard = Room(a_spec(tiny_models / "sd")).run(a_job("suspect"), a_job("one"), a_job("two"), solo=["suspect"])
    assert heard.ended["suspect"].batching.max_jobs == 1
    assert heard.ended["suspect"].batching.solo_reason == "ran solo because a worker was lost while running it"
    assert heard.ended["one"].batching.max_jobs == 2
    assert heard.ended["one"].batching.solo_reason is None


def test_release_all_throws_everyone_out_where_they_stand(tiny_models: Path) -> None:
    """At the end of a drain's time the jobs are given back; the engine takes new ones afterwards."""
    room = Stage(a_spec(tiny_models / "sd"))
    room.script.at("one", 1, room.engine.release_all)
    heard = room.run(a_job("one", steps=50), a_job("two", steps=50))
    assert heard.ended["one"].canceled
    assert heard.ended["two"].canceled
    assert heard.pictures == {}


def test_stop_ends_the_thread_in_mid_run(tiny_models: Path) -> None:
    """Stopping waits for the present forward, not for the jobs."""
    room = Stage(a_spec(tiny_models / "sd"))
    under_way = threading.Event()

    def await_the_stop() -> None:
        under_way.set()
        wait_until(lambda: not room.engine._inbox.empty(), "the engine is told to stop", TIMEOUT_S)

    room.script.at("long", 1, await_the_stop)
    room.seat(a_job("long", steps=500))
    with room.started() as engine:
        assert under_way.wait(TIMEOUT_S)
        assert engine.status().activity.busy
    assert engine.join(0)
    assert room.recorder.ended["long"].canceled
    assert room.recorder.rows == [1]


def test_a_job_that_ends_a_long_idleness_does_not_look_hung(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment that it makes the thread busy: whoever looks then would kill a worker that hangs."""
    room = Room(a_spec(tiny_models / "sd"))
    looked: list[Activity] = []
    start = ImageTask.start

    def look_and_start(self: ImageTask, device: torch.device) -> None:
        looked.append(room.engine.status().activity)
        start(self, device)

    monkeypatch.setattr(ImageTask, "start", look_and_start)
    with room.started() as engine:
        engine.warm_up()
        room.seat(a_job("before"))
        room.recorder.wait_for(["before"])
        wait_until(lambda: not engine._thread_timer.busy, "the thread is idle")
        engine._forward_timer.last_progress_s -= 3600.0
        seated_s = time.monotonic()
        room.seat(a_job("after"))
        room.recorder.wait_for(["after"])
    assert (looked[-1].busy, looked[-1].since_s >= seated_s) == (True, True)


def test_progress_counts_all_pictures_and_comes_in_order(tiny_models: Path) -> None:
    """Loading, then every step of both pictures, then decoding, the pictures and the end."""
    heard = Room(a_spec(tiny_models / "sd")).run(a_job("pair", n=2, steps=3))
    kinds = [entry[0] for entry in heard.heard]
    assert kinds == ["loading", *["progress"] * (len(kinds) - 4), "decoding", "picture", "picture"]
    steps = [(step, total) for kind, _, step, total in heard.heard[1:-3] if kind == "progress"]
    assert steps == sorted(steps)
    assert steps[-1] == (6, 6)
    assert {total for _, total in steps} == {6}
    batching = heard.ended["pair"].batching
    assert (batching.forwards, batching.max_jobs, batching.mean_rows) == (3, 1, 2.0)
    assert heard.ended["pair"].gpu_seconds > 0
    assert heard.ended["pair"].load_ms is not None


def a_company(chance: random.Random, at: int) -> list[Job]:
    """Some jobs to run beside another: other prompts, steps, guidance; most reproducible too, some from a picture."""
    jobs = []
    for other in range(chance.randint(1, 4)):
        more = {"strength": 0.6} if other and chance.random() < 0.2 else {}
        jobs.append(
            a_job(
                f"other{at}-{other}",
                prompt=" ".join(chance.choices(["a red", "circle", "on", "blue", "ground,", "left"], k=other + 1)),
                reproducible=chance.random() < 0.9,
                steps=chance.randint(2, 3),
                guidance_scale=chance.choice([1.0, 5.0]),
                **more,
            )
        )
    return jobs


@pytest.mark.parametrize("family", ["sd", "sd3", "demo"])
def test_reproducible_pictures_have_the_same_bits_in_any_company(family: str, tiny_models: Path) -> None:
    """Alone, or joining twenty random companies at random steps: not one bit differs."""
    chance = random.Random(3)
    spec = a_spec(DEMO if family == "demo" else tiny_models / family)
    job = a_job("exact", reproducible=True, steps=2)
    room = Stage(spec)
    with room.started():
        room.seat(job)
        room.recorder.wait_for(["exact"])
        for at in range(20):
            company, mine = a_company(chance, at), job.model_copy(update={"id": f"exact{at}"})
            room.script.at(company[0].id, chance.randint(1, company[0].steps), lambda mine=mine: room.seat(mine))
            room.seat(*company)
            room.recorder.wait_for([mine.id, *(other.id for other in company)])
    heard = room.recorder
    assert {name: ended.error for name, ended in heard.ended.items() if ended.error} == {}
    differing = [
        at for at in range(20) if not np.array_equal(heard.pictures[f"exact{at}", 0], heard.pictures["exact", 0])
    ]
    assert differing == []
    assert sum(heard.ended[f"exact{at}"].batching.max_jobs > 1 for at in range(20)) >= 5, "hardly any company"
