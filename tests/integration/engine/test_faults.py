"""A failure of one job, or of a fused forward, does not harm other jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import model_pool
from harness.engine import TIMEOUT_S, EngineHarness, EventRecorder, a_job, a_spec

from shared.errors import InferenceFailed, NonFiniteLatents, OutOfMemory
from shared.job import Job
from shared.job_record import FieldWarning
from shared.tasks import Task
from worker.engine.engine_status import allowed_rows
from worker.engine.fusion.module_proxy import SharedMethod
from worker.engine.pipelines.loaded_model import LoadedModel

pytestmark = pytest.mark.usefixtures("shared_models")

Before = Callable[[SharedMethod, dict[str, Any]], None]

POISON_TIME = 853  # the first time of 7 DDIM steps, which 4 steps never reach
TIMES_OF_FOUR_STEPS = {751, 501, 251, 1}
EIGHT = [f"job{at}" for at in range(8)]


@pytest.fixture(scope="module")
def solo(tiny_models: Path) -> dict[str, np.ndarray]:
    """The image of each of the eight jobs when it runs solo."""
    images = {}
    with model_pool.shared_models():
        for name in EIGHT:
            recorder = EngineHarness(a_spec(tiny_models / "sd")).run(a_job(name))
            images[name] = recorder.images[name, 0]
    return images


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return int(np.abs(one.astype(int) - other.astype(int)).max()) <= 1


@pytest.fixture
def before_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[Before], None]:
    """Call a function before each forward of a shared module, which then raises what the function raises."""
    monkeypatch.setattr("worker.engine.engine.run_self_check", lambda _model, _device: None)
    real = SharedMethod.run

    def install(before: Before) -> None:
        def run(method: SharedMethod, *args: Any, **kwargs: Any) -> Any:
            before(method, method.bind(args, kwargs))
            return real(method, *args, **kwargs)

        monkeypatch.setattr(SharedMethod, "run", run)

    return install


def fail_second_forward(before_forward: Callable[[Before], None]) -> list[int]:
    """Let the second forward of the denoiser run out of memory; returns the rows of each forward, as they begin."""
    attempts: list[int] = []

    def scarce_once(method: SharedMethod, arguments: dict[str, Any]) -> None:
        if method.component == "unet":
            attempts.append(arguments["sample"].shape[0] // 2)
            if len(attempts) == 2:
                raise torch.OutOfMemoryError("injected")

    before_forward(scarce_once)
    return attempts


def jobs_with(position: int, bad: Job) -> list[Job]:
    return [bad if at == position else a_job(name) for at, name in enumerate(EIGHT)]


def assert_others_unharmed(recorder: EventRecorder, position: int, solo: dict[str, np.ndarray]) -> None:
    for at, name in enumerate(EIGHT):
        if at != position:
            assert recorder.finished[name].error is None
            assert same(recorder.images[name, 0], solo[name])
    assert ("bad", 0) not in recorder.images


@pytest.mark.parametrize("position", [0, 3, 7])
def test_a_poison_job_fails_with_its_own_message_and_no_other_job_fails(
    position: int, tiny_models: Path, solo: dict[str, np.ndarray], before_forward: Callable[[Before], None]
) -> None:
    """A failed forward is repeated in halves until only the failing job is left."""
    forwards = []

    def poison(method: SharedMethod, arguments: dict[str, Any]) -> None:
        if method.component == "unet":
            times = torch.as_tensor(arguments["timestep"]).flatten().tolist()
            forwards.append(arguments["sample"].shape[0] // 2)  # guidance doubles the rows
            if POISON_TIME in times:
                raise ValueError("a poison time")

    before_forward(poison)
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(*jobs_with(position, a_job("bad", steps=7)))

    error = recorder.finished["bad"].error
    assert isinstance(error, InferenceFailed)
    assert "a poison time" in error.message
    assert_others_unharmed(recorder, position, solo)
    assert sorted(forwards[:7], reverse=True) == [8, 4, 4, 2, 2, 1, 1], (
        "the forwards of 8, 4, 2 and 1 rows fail, and three succeed"
    )
    assert forwards[7:] == [7, 7, 7], "no other forward is repeated"


# Rows that fit -> the rows of the denoiser forwards that fail. A count that failed is not tried again.
FAILED_ROWS = {1: [8, 4, 2], 2: [8, 4], 3: [8, 4], 4: [8], 7: [8]}


@pytest.mark.parametrize("fits", FAILED_ROWS)
def test_jobs_survive_memory_for_fewer_rows(
    fits: int, tiny_models: Path, solo: dict[str, np.ndarray], before_forward: Callable[[Before], None]
) -> None:
    """Running out of memory splits the batch; the limit is kept, and no step is repeated."""
    attempts: list[int] = []

    def scarce(method: SharedMethod, arguments: dict[str, Any]) -> None:
        if method.component == "unet":
            rows = arguments["sample"].shape[0] // 2
            attempts.append(rows)
            if rows > fits:
                raise torch.OutOfMemoryError("injected")

    before_forward(scarce)
    harness = EngineHarness(a_spec(tiny_models / "sd"))
    recorder = harness.run(*(a_job(name) for name in EIGHT))

    for name in EIGHT:
        assert recorder.finished[name].error is None
        assert same(recorder.images[name, 0], solo[name])
    assert [rows for rows in attempts if rows > fits] == FAILED_ROWS[fits]
    assert sum(recorder.rows) == 8 * 4
    assert allowed_rows(harness.engine.status(), a_job("next"), 8) <= fits


@pytest.mark.parametrize(("works", "failed"), {4: [8], 3: [8, 4, 4], 1: [8, 4, 2, 2, 4, 2, 2]}.items())
def test_a_number_of_rows_that_fails_for_all_jobs_is_not_tried_at_every_step(
    works: int,
    failed: list[int],
    tiny_models: Path,
    solo: dict[str, np.ndarray],
    before_forward: Callable[[Before], None],
) -> None:
    """A kernel or a model can refuse many rows: after the first step the limit is kept like that of memory."""
    attempts: list[int] = []

    def refuse(method: SharedMethod, arguments: dict[str, Any]) -> None:
        if method.component == "unet":
            attempts.append(arguments["sample"].shape[0] // 2)
            if attempts[-1] > works:
                raise RuntimeError("injected: invalid configuration argument")

    before_forward(refuse)
    harness = EngineHarness(a_spec(tiny_models / "sd"))
    recorder = harness.run(*(a_job(name) for name in EIGHT))
    assert all(same(recorder.images[name, 0], solo[name]) for name in EIGHT)
    assert [rows for rows in attempts if rows > works] == failed
    assert allowed_rows(harness.engine.status(), a_job("next"), 8) <= works


def test_a_job_that_fails_only_in_fused_forwards_runs_solo_from_then_on(
    tiny_models: Path, solo: dict[str, np.ndarray], before_forward: Callable[[Before], None]
) -> None:
    """Its forwards fail once, and the other jobs share theirs at the next step."""
    attempts: list[tuple[int, bool]] = []

    def refuse(method: SharedMethod, arguments: dict[str, Any]) -> None:
        if method.component == "unet":
            rows, times = arguments["sample"].shape[0] // 2, torch.as_tensor(arguments["timestep"]).flatten().tolist()
            fails = rows > 1 and not TIMES_OF_FOUR_STEPS.issuperset(times)
            attempts.append((rows, fails))
            if fails:
                raise RuntimeError("injected")

    before_forward(refuse)
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(*jobs_with(5, a_job("bad", steps=7)))
    assert recorder.finished["bad"].error is None
    assert all(same(recorder.images[name, 0], solo[name]) for name in EIGHT if name != EIGHT[5])
    assert [rows for rows, fails in attempts if fails] == [8, 4, 2]


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_a_single_lack_of_memory_fails_no_job_at_any_row_count(
    rows: int, tiny_models: Path, solo: dict[str, np.ndarray], before_forward: Callable[[Before], None]
) -> None:
    """One forward runs out of memory, and only that one is repeated."""
    attempts = fail_second_forward(before_forward)
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(*(a_job(name) for name in EIGHT[:rows]))

    for name in EIGHT[:rows]:
        assert recorder.finished[name].error is None
        assert same(recorder.images[name, 0], solo[name])
    assert attempts[:2] == [rows, rows]
    assert sum(attempts) - rows == sum(recorder.rows) == 4 * rows, "only the forward without memory is repeated"


def test_two_jobs_share_forwards_again_once_there_is_memory(
    tiny_models: Path, before_forward: Callable[[Before], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward of both ran out of memory: after some solo ones both are tried again."""
    monkeypatch.setattr("worker.engine.scheduling.memory_limits.FIRST_RETRY_S", 0.0)
    attempts = fail_second_forward(before_forward)
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(a_job("one", steps=30), a_job("two", steps=30))
    assert [recorder.finished[name].error for name in ("one", "two")] == [None, None]
    assert attempts[:4] == [2, 2, 1, 1]
    assert attempts.count(2) > 5, attempts


def test_a_job_that_does_not_fit_solo_fails_with_out_of_memory(
    tiny_models: Path, before_forward: Callable[[Before], None]
) -> None:
    """The error is retryable."""

    def none_left(method: SharedMethod, _arguments: dict[str, Any]) -> None:
        if method.component == "unet":
            raise torch.OutOfMemoryError("injected")

    before_forward(none_left)
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(a_job("one"), a_job("two"))
    for name in ("one", "two"):
        error = recorder.finished[name].error
        assert isinstance(error, OutOfMemory)
        assert error.retryable


@pytest.mark.parametrize("component", ["vae", "text_encoder"])
def test_forwards_of_the_vae_and_the_text_encoder_split_too(
    component: str, tiny_models: Path, solo: dict[str, np.ndarray], before_forward: Callable[[Before], None]
) -> None:
    """Running out of memory there fails no job either."""

    def scarce(method: SharedMethod, arguments: dict[str, Any]) -> None:
        first = next(iter(arguments.values()))
        if method.component == component and first.shape[0] > 3:
            raise torch.OutOfMemoryError("injected")

    before_forward(scarce)
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(*(a_job(name) for name in EIGHT))
    assert all(same(recorder.images[name, 0], solo[name]) for name in EIGHT)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_latents_that_are_not_finite_fail_only_their_job(
    value: float, tiny_models: Path, solo: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with a non-finite value fails its job with a code; the images of its batch mates do not change."""
    real = SharedMethod.run

    def spoil(method: SharedMethod, *args: Any, **kwargs: Any) -> Any:
        output = real(method, *args, **kwargs)
        if method.component == "unet":
            times = torch.as_tensor(method.bind(args, kwargs)["timestep"]).flatten().tolist()
            for row in (at for at, time in enumerate(times) if time == POISON_TIME):
                output[0][row, 0, 0, 0] = value
        return output

    monkeypatch.setattr("worker.engine.engine.run_self_check", lambda _model, _device: None)
    monkeypatch.setattr(SharedMethod, "run", spoil)
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(*jobs_with(2, a_job("bad", steps=7)))
    error = recorder.finished["bad"].error
    assert isinstance(error, NonFiniteLatents)
    assert error.code == "non_finite_latents"
    assert_others_unharmed(recorder, 2, solo)
    assert recorder.finished["bad"].batching.max_jobs == 8


def test_an_extreme_guidance_scale_fails_only_its_job(tiny_models: Path, solo: dict[str, np.ndarray]) -> None:
    """Its latents overflow."""
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(*jobs_with(2, a_job("bad", guidance_scale=1e38)))
    assert isinstance(recorder.finished["bad"].error, NonFiniteLatents)
    assert_others_unharmed(recorder, 2, solo)


def test_an_error_of_the_pipeline_fails_only_its_job(tiny_models: Path, solo: dict[str, np.ndarray]) -> None:
    """A size that the pipeline refuses fails with the pipeline's message."""
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(*jobs_with(5, a_job("bad", width=60)))
    error = recorder.finished["bad"].error
    assert isinstance(error, InferenceFailed)
    assert "divisible by 8" in error.message
    assert_others_unharmed(recorder, 5, solo)


def test_an_input_image_that_cannot_be_decoded_fails_only_its_job(tiny_models: Path) -> None:
    """The error names the field."""
    harness = EngineHarness(a_spec(tiny_models / "sd"))
    harness.submit(a_job("bad", strength=0.5), image=b"not an image")
    harness.submit(a_job("good"))
    with harness.started():
        harness.recorder.wait_for(["bad", "good"])
    error = harness.recorder.finished["bad"].error
    assert isinstance(error, InferenceFailed)
    assert error.param == "image"
    assert harness.recorder.finished["good"].error is None


def test_an_image_that_the_model_refuses_to_edit_is_a_fault_of_the_request(tiny_model: Callable[[str], Path]) -> None:
    """A synchronous call then gets 422, not 500."""
    sizes = {"at least 64px": (32, 32), "ratio is 8:1": (640, 64)}
    jobs = [a_job(fault, task=Task.EDIT, reference_sizes=(size,)) for fault, size in sizes.items()]
    spec = a_spec(tiny_model("flux-2-klein"), tasks=(Task.EDIT,))
    recorder = EngineHarness(spec).run(*jobs, a_job("good", task=Task.EDIT))
    for fault in sizes:
        error = recorder.finished[fault].error
        assert error is not None
        assert (error.code, error.param) == ("invalid_input_image", "image")
        assert fault in error.message
    assert recorder.finished["good"].error is None


def test_a_failed_image_fails_the_other_images_of_its_job(
    tiny_models: Path, before_forward: Callable[[Before], None]
) -> None:
    """A job of several images succeeds or fails once."""
    seen = []

    def second_decode_fails(method: SharedMethod, arguments: dict[str, Any]) -> None:
        if method.component == "vae":
            seen.append(arguments["z"].shape[0])
            if arguments["z"].shape[0] > 1 or len(seen) == 3:
                raise RuntimeError("injected")

    before_forward(second_decode_fails)
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(a_job("pair", n=2))
    assert seen == [2, 1, 1]
    assert isinstance(recorder.finished["pair"].error, InferenceFailed)


def test_a_lost_device_is_reported_as_a_hang_and_fails_no_job(
    tiny_models: Path, before_forward: Callable[[Before], None]
) -> None:
    """The process cannot continue after such an error, and the jobs run on another worker."""

    def lose(method: SharedMethod, _arguments: dict[str, Any]) -> None:
        if method.component == "unet":
            raise torch.AcceleratorError("injected: device-side assert")

    before_forward(lose)
    harness = EngineHarness(a_spec(tiny_models / "sd"))
    harness.submit(a_job("victim"))
    harness.engine.start()
    harness.engine.join(TIMEOUT_S)
    assert "victim" not in harness.recorder.finished
    activity = harness.engine.status().activity
    assert activity.busy
    assert activity.since_s == float("-inf")


def test_a_fault_before_the_first_step_ends_only_its_job(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads a job's texts runs on the engine's thread, outside its image task."""
    real = LoadedModel.warnings

    def warnings(model: LoadedModel, job: Job) -> tuple[FieldWarning, ...]:
        if job.id == "odd":
            raise KeyError("a word of the prompt")
        return real(model, job)

    monkeypatch.setattr(LoadedModel, "warnings", warnings)
    jobs = [a_job("good", steps=2), a_job("odd", steps=2), a_job("after", steps=2)]
    finished = EngineHarness(a_spec(tiny_models / "sd")).run(*jobs).finished
    assert isinstance(finished["odd"].error, InferenceFailed)
    assert [finished[name].error for name in ("good", "after")] == [None, None]
