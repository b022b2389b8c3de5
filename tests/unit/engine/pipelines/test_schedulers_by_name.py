"""Noise schedulers by name: which ones fit a model, and what becomes of those that cannot be used."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    SchedulerMixin,
    UniPCMultistepScheduler,
)

from shared.config.noise_schedulers import FLOW_OPTION, NOISE_ONLY, misfit, predicts_flow
from shared.errors import ModelUnavailable
from worker.engine.pipelines.noise_schedulers import make_scheduler, make_schedulers


def parameters_of_schedulers() -> dict[str, Any]:
    found = {name: getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Scheduler")}
    classes = {name: one for name, one in found.items() if isinstance(one, type) and issubclass(one, SchedulerMixin)}
    return {name: inspect.signature(one.__init__).parameters for name, one in classes.items()}


def test_the_kinds_are_those_of_diffusers() -> None:
    """Those left out follow other rules: their names are neither refused nor given options."""
    parameters = parameters_of_schedulers()
    of_helios = {"HeliosScheduler", "HeliosDMDScheduler"}
    assert {name for name, one in parameters.items() if "use_flow_sigmas" in one} == FLOW_OPTION | of_helios
    predicting = {name for name, one in parameters.items() if "prediction_type" in one}
    assert predicting - FLOW_OPTION - of_helios - {"SCMScheduler"} == NOISE_ONLY & parameters.keys()


def test_a_scheduler_by_name_has_the_models_configuration() -> None:
    """The method changes, the model's noise schedule does not."""
    own = DDIMScheduler(beta_start=0.002, prediction_type="v_prediction")
    named = make_scheduler("EulerDiscreteScheduler", own)
    assert isinstance(named, EulerDiscreteScheduler)
    assert named.config["beta_start"] == 0.002
    assert named.config["prediction_type"] == "v_prediction"


@pytest.mark.parametrize("name", ["DiffusionPipeline", "os", "Nothing", "__version__"])
def test_a_name_that_is_not_a_scheduler_is_refused(name: str) -> None:
    """Other classes of diffusers are refused."""
    with pytest.raises(ModelUnavailable):
        make_scheduler(name, DDIMScheduler())


FLOW = FlowMatchEulerDiscreteScheduler(shift=3.0)
WAN = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=5.0)
NOISE = DDIMScheduler()


@pytest.mark.parametrize(
    ("own", "name", "made"),
    [
        (FLOW, "UniPCMultistepScheduler", {"use_flow_sigmas": True, "flow_shift": 3.0}),
        (FLOW, "DPMSolverMultistepScheduler", {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}),
        (FLOW, "FlowMatchHeunDiscreteScheduler", {"shift": 3.0}),
        (FLOW, "DDIMScheduler", "removes noise"),
        (WAN, "DPMSolverMultistepScheduler", {"use_flow_sigmas": True, "flow_shift": 5.0}),
        (WAN, "FlowMatchEulerDiscreteScheduler", {"shift": 5.0}),
        (WAN, "EulerDiscreteScheduler", "removes noise"),
        (NOISE, "UniPCMultistepScheduler", {"use_flow_sigmas": False, "prediction_type": "epsilon"}),
        (NOISE, "FlowMatchEulerDiscreteScheduler", "follows a flow"),
    ],
)
def test_a_scheduler_is_set_to_what_the_model_predicts(own: Any, name: str, made: Any) -> None:
    """One that cannot be is refused: with it, a job would succeed with an image of noise."""
    reason = misfit(name, predicts_flow(own.config, type(own).__name__))
    if isinstance(made, str):
        assert made in str(reason)
        with pytest.raises(ModelUnavailable, match=made):
            make_scheduler(name, own)
    else:
        assert reason is None
        config = make_scheduler(name, own).config
        assert {option: config[option] for option in made} == made


def test_a_configuration_that_a_class_refuses_is_an_error_of_the_name() -> None:
    """diffusers raises several types."""
    own = DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++")
    with pytest.raises(ModelUnavailable, match="DEISMultistepScheduler cannot be used"):
        make_scheduler("DEISMultistepScheduler", own)
    with pytest.raises(ModelUnavailable, match="no noise scheduler of its own"):
        make_scheduler("DDIMScheduler", None)


def test_a_name_that_cannot_be_used_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error says what is missing."""
    monkeypatch.setattr("worker.engine.pipelines.noise_schedulers.find_spec", lambda package: None)
    monkeypatch.setattr(diffusers, "LMSDiscreteScheduler", type("Dummy", (), {"_backends": ["scipy"]}))
    made = make_schedulers(("LMSDiscreteScheduler", "EulerDiscreteScheduler"), NOISE, "demo")
    assert isinstance(made["EulerDiscreteScheduler"], EulerDiscreteScheduler)
    assert "LMSDiscreteScheduler needs the package scipy" in str(made["LMSDiscreteScheduler"])
