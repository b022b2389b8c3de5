"""What goes wrong in one job, or in a fused forward, stays where it belongs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.engine import TIMEOUT_S, Recorder, Room, a_job, a_spec

from shared.errors import InferenceFailed, NonFiniteLatents, OutOfMemory
from shared.job import Job
from worker.engine import allowed_rows
from worker.engine.fusion.module_proxy import SharedMethod

Before = Callable[[SharedMethod, dict[str, Any]], None]

POISON_TIME = 853  # the first time of 7 DDIM steps, which 4 steps never reach
EIGHT = [f"job{at}" for at in range(8)]


@pytest.fixture(scope="module")
def lone(tiny_models: Path) -> dict[str, np.ndarray]:
    """What each of the eight jobs gets when nobody else is there."""
    pictures = {}
    for name in EIGHT:
        heard = Room(a_spec(tiny_models / "sd")).run(a_job(name))
        pictures[name] = heard.pictures[name, 0]
    return pictures


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return int(np.abs(one.astype(int) - other.astype(int)).max()) <= 1


@pytest.fixture
def before_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[Before], None]:
    """Have a function called ahead of each forward of a shared module: what it raises, the module raises."""
    monkeypatch.setattr("worker.engine.engine.run_self_check", lambda _model, _device: None)
    real = SharedMethod.run

    def install(before: Before) -> None:
        def run(point: SharedMethod, *args: Any, **kwargs: Any) -> Any:
            before(point, point.bind(args, kwargs))
            return real(point, *args, **kwargs)

        monkeypatch.setattr(SharedMethod, "run", run)

    return install


def jobs_with(position: int, bad: Job) -> list[Job]:
    return [bad if at == position else a_job(name) for at, name in enumerate(EIGHT)]


def assert_others_unharmed(heard: Recorder, position: int, lone: dict[str, np.ndarray]) -> None:
    for at, name in enumerate(EIGHT):
        if at != position:
            assert heard.ended[name].error is None
            assert same(heard.pictures[name, 0], lone[name])
    assert ("bad", 0) not in heard.pictures


@pytest.mark.parametrize("position", range(8))
def test_a_poison_job_fails_alone_with_its_own_message(
    position: int, tiny_models: Path, lone: dict[str, np.ndarray], before_forward: Callable[[Before], None]
) -> None:
    """The forward that fails is tried again in halves, until only the job that makes it fail is left."""
    forwards = []

    def poison(point: SharedMethod, arguments: dict[str, Any]) -> None:
        if point.component == "unet":
            times = torch.as_tensor(arguments["timestep"]).flatten().tolist()
            forwards.append(arguments["sample"].shape[0] // 2)  # guidance doubles the rows
            if POISON_TIME in times:
                raise ValueError("a poisonous time")

    before_forward(poison)
    heard = Room(a_spec(tiny_models / "sd")).run(*jobs_with(position, a_job("bad", steps=7)))

    error = heard.ended["bad"].error
    assert isinstance(error, InferenceFailed)
    assert "a poisonous time" in error.message
    assert_others_unharmed(heard, position, lone)
    assert sorted(forwards[:7], reverse=True) == [8, 4, 4, 2, 2, 1, 1], "four fail, of 8, 4, 2 and 1, and one each ends"
    assert forwards[7:] == [7, 7, 7], "nothing else is run twice"


# How many rows fit -> the denoiser forwards that fail, by rows. What did not fit is not tried again.
REPEATED = {1: [8, 4, 2], 2: [8, 4], 3: [8, 4], 4: [8], 5: [8], 6: [8], 7: [8]}


@pytest.mark.parametrize("fits", range(1, 8))
def test_jobs_survive_memory_that_holds_only_some_of_them(
    fits: int, tiny_models: Path, lone: dict[str, np.ndarray], before_forward: Callable[[Before], None]
) -> None:
    """Out of memory splits the group from where it stands; the cap is remembered, and no step is repeated."""
    tries: list[int] = []

    def scarce(point: SharedMethod, arguments: dict[str, Any]) -> None:
        if point.component == "unet":
            rows = arguments["sample"].shape[0] // 2
            tries.append(rows)
            if rows > fits:
                raise torch.OutOfMemoryError("injected")

    before_forward(scarce)
    room = Room(a_spec(tiny_models / "sd"))
    heard = room.run(*(a_job(name) for name in EIGHT))

    for name in EIGHT:
        assert heard.ended[name].error is None
        assert same(heard.pictures[name, 0], lone[name])
    assert [rows for rows in tries if rows > fits] == REPEATED[fits]
    assert sum(heard.rows) == 8 * 4
    assert allowed_rows(room.engine.status(), a_job("next"), 8) <= fits


@pytest.mark.parametrize("rows", range(1, 9))
def test_a_moment_without_memory_loses_nothing_at_any_row_count(
    rows: int, tiny_models: Path, lone: dict[str, np.ndarray], before_forward: Callable[[Before], None]
) -> None:
    """One forward in mid-run finds no memory, whatever its rows: one more is run, and only that one was in vain."""
    tries: list[int] = []

    def scarce_once(point: SharedMethod, arguments: dict[str, Any]) -> None:
        if point.component == "unet":
            tries.append(arguments["sample"].shape[0] // 2)
            if len(tries) == 2:
                raise torch.OutOfMemoryError("injected")

    before_forward(scarce_once)
    heard = Room(a_spec(tiny_models / "sd")).run(*(a_job(name) for name in EIGHT[:rows]))

    for name in EIGHT[:rows]:
        assert heard.ended[name].error is None
        assert same(heard.pictures[name, 0], lone[name])
    assert tries[:2] == [rows, rows]
    assert sum(tries) - rows == sum(heard.rows) == 4 * rows, "only the forward without memory was in vain"


def test_a_job_that_does_not_fit_even_alone_fails_with_out_of_memory(
    tiny_models: Path, before_forward: Callable[[Before], None]
) -> None:
    """Memory that holds no row at all is the job's error, which says that another try may help."""

    def none_left(point: SharedMethod, _arguments: dict[str, Any]) -> None:
        if point.component == "unet":
            raise torch.OutOfMemoryError("injected")

    before_forward(none_left)
    heard = Room(a_spec(tiny_models / "sd")).run(a_job("one"), a_job("two"))
    for name in ("one", "two"):
        error = heard.ended[name].error
        assert isinstance(error, OutOfMemory)
        assert error.retryable


@pytest.mark.parametrize("component", ["vae", "text_encoder"])
def test_the_vae_and_the_text_encoder_split_too(
    component: str, tiny_models: Path, lone: dict[str, np.ndarray], before_forward: Callable[[Before], None]
) -> None:
    """They are meeting points like the denoiser: running out of memory there loses no job."""

    def scarce(point: SharedMethod, arguments: dict[str, Any]) -> None:
        first = next(iter(arguments.values()))
        if point.component == component and first.shape[0] > 3:
            raise torch.OutOfMemoryError("injected")

    before_forward(scarce)
    heard = Room(a_spec(tiny_models / "sd")).run(*(a_job(name) for name in EIGHT))
    assert all(same(heard.pictures[name, 0], lone[name]) for name in EIGHT)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_latents_that_are_not_finite_fail_their_job_alone(
    value: float, tiny_models: Path, lone: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row that a forward spoils fails its own job, with a code; its companions' pictures are untouched."""
    real = SharedMethod.run

    def spoil(point: SharedMethod, *args: Any, **kwargs: Any) -> Any:
        output = real(point, *args, **kwargs)
        if point.component == "unet":
            times = torch.as_tensor(point.bind(args, kwargs)["timestep"]).flatten().tolist()
            for row in (at for at, time in enumerate(times) if time == POISON_TIME):
                output[0][row, 0, 0, 0] = value
        return output

    monkeypatch.setattr("worker.engine.engine.run_self_check", lambda _model, _device: None)
    monkeypatch.setattr(SharedMethod, "run", spoil)
    heard = Room(a_spec(tiny_models / "sd")).run(*jobs_with(2, a_job("bad", steps=7)))
    error = heard.ended["bad"].error
    assert isinstance(error, NonFiniteLatents)
    assert error.code == "non_finite_latents"
    assert_others_unharmed(heard, 2, lone)
    assert heard.ended["bad"].batching.max_jobs == 8


def test_a_guidance_beyond_all_measure_fails_its_job_alone(tiny_models: Path, lone: dict[str, np.ndarray]) -> None:
    """Its latents overflow by themselves, and nobody else's do."""
    heard = Room(a_spec(tiny_models / "sd")).run(*jobs_with(2, a_job("bad", guidance_scale=1e38)))
    assert isinstance(heard.ended["bad"].error, NonFiniteLatents)
    assert_others_unharmed(heard, 2, lone)


def test_an_error_in_a_jobs_own_code_ends_that_job_only(tiny_models: Path, lone: dict[str, np.ndarray]) -> None:
    """A size that the pipeline itself refuses is told in the pipeline's words."""
    heard = Room(a_spec(tiny_models / "sd")).run(*jobs_with(5, a_job("bad", width=60)))
    error = heard.ended["bad"].error
    assert isinstance(error, InferenceFailed)
    assert "divisible by 8" in error.message
    assert_others_unharmed(heard, 5, lone)


def test_a_picture_that_cannot_be_decoded_ends_its_job_only(tiny_models: Path) -> None:
    """The error names the field that is at fault."""
    room = Room(a_spec(tiny_models / "sd"))
    room.seat(a_job("bad", strength=0.5), image=b"no picture")
    room.seat(a_job("good"))
    with room.started():
        room.recorder.wait_for(["bad", "good"])
    error = room.recorder.ended["bad"].error
    assert isinstance(error, InferenceFailed)
    assert error.param == "image"
    assert room.recorder.ended["good"].error is None


def test_a_failed_picture_takes_its_jobs_other_pictures_with_it(
    tiny_models: Path, before_forward: Callable[[Before], None]
) -> None:
    """A job of several pictures succeeds or fails as one, and is told so once."""
    seen = []

    def second_decode_fails(point: SharedMethod, arguments: dict[str, Any]) -> None:
        if point.component == "vae":
            seen.append(arguments["z"].shape[0])
            if arguments["z"].shape[0] > 1 or len(seen) == 3:
                raise RuntimeError("injected")

    before_forward(second_decode_fails)
    heard = Room(a_spec(tiny_models / "sd")).run(a_job("pair", n=2))
    assert seen == [2, 1, 1]
    assert isinstance(heard.ended["pair"].error, InferenceFailed)


def test_a_lost_device_is_told_as_a_hang_and_blamed_on_no_job(
    tiny_models: Path, before_forward: Callable[[Before], None]
) -> None:
    """After such an error nothing works in this process: it must leave, and the jobs run elsewhere."""

    def lose(point: SharedMethod, _arguments: dict[str, Any]) -> None:
        if point.component == "unet":
            raise torch.AcceleratorError("injected: device-side assert")

    before_forward(lose)
    room = Room(a_spec(tiny_models / "sd"))
    room.seat(a_job("victim"))
    room.engine.start()
    room.engine.join(TIMEOUT_S)
    assert "victim" not in room.recorder.ended
    activity = room.engine.status().activity
    assert activity.busy
    assert activity.since_s == float("-inf")
