"""Whatever a model's or pipeline's code raises concerns only that model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import greenlet
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from harness import model_pool
from harness.engine import DIFFUSERS_AND_NUMPY, TIMEOUT_S, EngineHarness, a_job, a_spec
from harness.waiting import wait_until

from shared.errors import JobError, OutOfMemory
from worker.engine.checks import self_check
from worker.engine.fusion.module_proxy import SharedMethod
from worker.engine.pipelines import loaded_model

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)

ERRORS = [KeyError, KeyboardInterrupt, greenlet.GreenletExit]


class Odd:
    """Makes a method of diffusers or of the engine raise an error until `switch_off`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._on = True

    def make(self, owner: Any, name: str, error: BaseException, when: Callable[..., bool] = lambda *_: True) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._on and when(*args):
                raise error
            return real(*args, **kwargs)

        self._patch.setattr(owner, name, call)

    def switch_off(self) -> None:
        self._on = False


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Odd:
    return Odd(monkeypatch)


def error_of_odd_model(odd: Odd, tiny_models: Path) -> JobError:
    """Run a job of the odd model, an SD3, then one of another model, which must succeed; return the first's error."""
    odd_spec, good_spec = a_spec(tiny_models / "sd3", model="odd"), a_spec(tiny_models / "sd", model="good")
    harness = EngineHarness(odd_spec, good_spec, fresh=("odd",))
    with model_pool.shared_models(), harness.started():
        harness.submit(a_job("fails", model="odd", steps=2))
        harness.recorder.wait_for(["fails"])
        odd.switch_off()
        harness.submit(a_job("works", model="good", steps=2))
        harness.recorder.wait_for(["works"])
    assert harness.recorder.finished["works"].error is None
    error = harness.recorder.finished["fails"].error
    assert error is not None
    return error


@pytest.mark.parametrize("kind", ERRORS)
def test_what_a_module_raises_concerns_only_its_model(kind: type[BaseException], odd: Odd, tiny_models: Path) -> None:
    """It raises in the self-check first, then in its job."""
    odd.make(SharedMethod, "run", kind("injected"), lambda method, *_: method.component == "transformer")
    assert "injected" in error_of_odd_model(odd, tiny_models).message


@pytest.mark.parametrize("kind", ERRORS[1:])
def test_what_a_pipeline_raises_concerns_only_its_model(kind: type[BaseException], odd: Odd, tiny_models: Path) -> None:
    """Its own code, outside the shared modules."""
    odd.make(StableDiffusion3Pipeline, "prepare_latents", kind("injected"))
    assert "injected" in error_of_odd_model(odd, tiny_models).message


def test_what_a_load_raises_concerns_only_its_model(odd: Odd, tiny_models: Path) -> None:
    """Jobs that wait for the model end."""
    odd.make(DiffusionPipeline, "from_pretrained", SystemExit("injected"))
    assert "injected" in error_of_odd_model(odd, tiny_models).message


def test_an_error_of_the_check_itself_leaves_the_model_unfused(odd: Odd, tiny_models: Path) -> None:
    """Its jobs run one by one, and say why."""
    odd.make(self_check, "decode_inputs", LookupError("injected"))
    spec = a_spec(tiny_models / "sd")
    recorder = EngineHarness(spec).run(a_job("one", steps=2), a_job("two", steps=2))
    assert [recorder.finished[name].error for name in ("one", "two")] == [None, None]
    assert recorder.rows == [1, 1, 1, 1]
    reason = recorder.finished["one"].batching.solo_reason
    assert reason is not None
    assert "self-check" in reason


def test_a_device_lost_in_the_self_check_ends_the_engine(odd: Odd, tiny_models: Path) -> None:
    """It is reported as a hang, as everywhere: the process cannot continue."""
    odd.make(SharedMethod, "run", torch.AcceleratorError("injected: device-side assert"))
    harness = EngineHarness(a_spec(tiny_models / "sd"))
    harness.submit(a_job("victim"))
    harness.engine.start()
    harness.engine.join(TIMEOUT_S)
    assert "victim" not in harness.recorder.finished
    assert harness.engine.status().activity.since_s == float("-inf")


class ScarceMemory:
    """Memory for at most `rows` images in a forward of the UNet, without the doubling by guidance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        self.rows = rows
        real = SharedMethod.run

        def run(method: SharedMethod, *args: Any, **kwargs: Any) -> Any:
            if method.component == "unet" and method.bind(args, kwargs)["sample"].shape[0] > 2 * self.rows:
                raise torch.OutOfMemoryError("injected")
            return real(method, *args, **kwargs)

        monkeypatch.setattr(SharedMethod, "run", run)


def test_a_self_check_without_memory_for_all_rows_checks_fewer(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows show whether a rule is right."""
    ScarceMemory(monkeypatch, 2)
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(*(a_job(name, steps=2) for name in ("a", "b", "c", "d")))
    assert {error for name in "abcd" if (error := recorder.finished[name].error)} == set()
    assert recorder.rows[0] == 2


@pytest.mark.parametrize("rows", [0, 1])
def test_a_self_check_without_memory_is_repeated_later(
    rows: int, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then jobs run solo with a reason; reproducible ones, which fused forwards would change, fail."""
    monkeypatch.setattr(loaded_model, "FIRST_RECHECK_S", 1000.0)
    memory = ScarceMemory(monkeypatch, rows)
    harness = EngineHarness(a_spec(tiny_models / "sd"))
    with harness.started() as engine:
        engine.warm_up()
        memory.rows = 8
        harness.submit(a_job("solo", steps=2), a_job("exact", steps=2, reproducible=True))
        harness.recorder.wait_for(["solo", "exact"])
        engine._models.loaded["tiny"].next_check_s = 0.0
        harness.submit(a_job("wakes", steps=2))
        harness.recorder.wait_for(["wakes"])
        more = [a_job("one", steps=2), a_job("two", steps=2), a_job("exact-later", steps=2, reproducible=True)]
        harness.submit(*more)
        harness.recorder.wait_for([job.id for job in more])
    finished = harness.recorder.finished
    assert isinstance(finished["exact"].error, OutOfMemory)
    assert finished["solo"].error is None
    reason = finished["solo"].batching.solo_reason
    assert reason is not None
    assert "memory" in reason
    assert [finished[job.id].error for job in more] == [None, None, None]
    assert finished["one"].batching.max_jobs == 2


def test_an_idle_engine_repeats_a_self_check_that_lacked_memory(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reproducible job that comes next runs."""
    plan = loaded_model.LoadedModel.plan_next_check

    def plan_soon(model: loaded_model.LoadedModel) -> None:
        model._check_interval_s = 0.3
        plan(model)

    monkeypatch.setattr(loaded_model.LoadedModel, "plan_next_check", plan_soon)
    memory = ScarceMemory(monkeypatch, 1)
    harness = EngineHarness(a_spec(tiny_models / "sd"))
    with harness.started() as engine:
        engine.warm_up()
        model = engine._models.loaded["tiny"]
        assert model.awaits_memory
        memory.rows = 8
        wait_until(lambda: not model.awaits_memory, "the check was repeated", 30)
        harness.submit(a_job("exact", steps=2, reproducible=True))
        harness.recorder.wait_for(["exact"])
    assert harness.recorder.finished["exact"].error is None
