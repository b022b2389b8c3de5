"""Whatever a model's or pipeline's code raises concerns only that model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import greenlet
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from harness.engine import DIFFUSERS_AND_NUMPY, TIMEOUT_S, EngineHarness, a_job, a_spec

from shared.errors import JobError
from worker.engine.fusion import self_check
from worker.engine.fusion.module_proxy import SharedMethod

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)

ERRORS = [KeyError, SystemExit, KeyboardInterrupt, greenlet.GreenletExit]


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
    harness = EngineHarness(a_spec(tiny_models / "sd3", model="odd"), a_spec(tiny_models / "sd", model="good"))
    with harness.started():
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
