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
    IPNDMScheduler,
    SchedulerMixin,
    UniPCMultistepScheduler,
)
from harness.engine import DIFFUSERS_AND_NUMPY

from shared.config.noise_schedulers import FLOW_OPTION, NOISE_ONLY, OPTIONS, misfit, predicts_flow
from shared.config.scheduler_choices import SchedulerChoice, named_choice
from shared.errors import InferenceFailed, ModelUnavailable
from worker.engine.pipelines.chosen_schedulers import ChosenSchedulers, make_scheduler, unusable_options


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
    named = make_scheduler(SchedulerChoice(name="EulerDiscreteScheduler"), own)
    assert isinstance(named, EulerDiscreteScheduler)
    assert named.config["beta_start"] == 0.002
    assert named.config["prediction_type"] == "v_prediction"


@pytest.mark.parametrize("name", ["DiffusionPipeline", "os", "Nothing", "__version__"])
def test_a_name_that_is_not_a_scheduler_is_refused(name: str) -> None:
    """Other classes of diffusers are refused."""
    with pytest.raises(ModelUnavailable):
        make_scheduler(SchedulerChoice(name=name), DDIMScheduler())


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
            make_scheduler(SchedulerChoice(name=name), own)
    else:
        assert reason is None
        config = make_scheduler(SchedulerChoice(name=name), own).config
        assert {option: config[option] for option in made} == made


def test_a_configuration_that_a_class_refuses_is_an_error_of_the_name() -> None:
    """diffusers raises several types."""
    own = DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++")
    with pytest.raises(ModelUnavailable, match="DEISMultistepScheduler cannot be used"):
        make_scheduler(SchedulerChoice(name="DEISMultistepScheduler"), own)
    with pytest.raises(ModelUnavailable, match="no noise scheduler of its own"):
        make_scheduler(SchedulerChoice(name="DDIMScheduler"), None)


def test_a_name_that_cannot_be_used_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error says what is missing."""
    monkeypatch.setattr("worker.engine.pipelines.chosen_schedulers.find_spec", lambda package: None)
    monkeypatch.setattr(diffusers, "LMSDiscreteScheduler", type("Dummy", (), {"_backends": ["scipy"]}))
    made = ChosenSchedulers("demo")
    made.load(("LMSDiscreteScheduler", "EulerDiscreteScheduler"), NOISE)
    assert isinstance(made.get("EulerDiscreteScheduler", None, NOISE), EulerDiscreteScheduler)
    with pytest.raises(InferenceFailed, match="LMSDiscreteScheduler needs the package scipy"):
        made.get("LMSDiscreteScheduler", None, NOISE)
    assert made.unusable == {"LMSDiscreteScheduler": "LMSDiscreteScheduler needs the package scipy"}


def test_a_name_whose_option_cannot_be_used_leaves_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class without options is unusable only if it cannot be made."""
    made = ChosenSchedulers("demo")
    made.load(("DDIM Karras", "Euler Karras", "Nothing Karras"), NOISE)
    assert made.unusable == {
        "DDIM Karras": "DDIMScheduler has no option 'karras'",
        "Nothing Karras": "diffusers has no scheduler 'Nothing Karras'",
    }
    for found, unusable in ((None, {"beta": "needs the package scipy"}), (object(), {})):
        monkeypatch.setattr("worker.engine.pipelines.chosen_schedulers.find_spec", lambda package, found=found: found)
        assert unusable_options() == unusable


def test_the_options_are_those_of_diffusers() -> None:
    """A request is refused at submit for an option that its class lacks."""
    of_constructor = {
        "use_karras_sigmas": "karras",
        "use_exponential_sigmas": "exponential",
        "use_beta_sigmas": "beta",
        "timestep_spacing": "spacing",
        "shift": "shift",
        "flow_shift": "shift",
    }
    for name, parameters in parameters_of_schedulers().items():
        if name not in OPTIONS:
            continue
        options = {option for parameter, option in of_constructor.items() if parameter in parameters}
        steps = inspect.signature(getattr(diffusers, name).set_timesteps).parameters
        # UniPC takes arrays only.
        options |= ({"timesteps", "sigmas"} & steps.keys()) - ({"sigmas"} if name.startswith("UniPC") else set())
        options |= {"sde"} if name.startswith("DPMSolver") else set()
        assert OPTIONS[name] == options, name


@pytest.mark.parametrize(
    ("own", "choice", "made"),
    [
        (NOISE, SchedulerChoice(name="dpmpp_2m_karras"), {"use_karras_sigmas": True, "algorithm_type": "dpmsolver++"}),
        (
            NOISE,
            SchedulerChoice(name="DPM++ 2M SDE Exponential"),
            {"use_exponential_sigmas": True, "algorithm_type": "sde-dpmsolver++"},
        ),
        (NOISE, SchedulerChoice(spacing="trailing"), {"_class_name": "DDIMScheduler", "timestep_spacing": "trailing"}),
        (
            EulerDiscreteScheduler(use_karras_sigmas=True),
            SchedulerChoice(name="Euler Exponential"),
            {"use_karras_sigmas": False},
        ),
        (FLOW, SchedulerChoice(shift=7.0), {"shift": 7.0, "use_dynamic_shifting": False}),
        (FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), SchedulerChoice(shift=7.0), {"shift": 7.0}),
        (FLOW, SchedulerChoice(name="unipc", shift=7.0), {"use_flow_sigmas": True, "flow_shift": 7.0}),
        (NOISE, SchedulerChoice(name="ddim", karras=True), "no option 'karras'"),
        (FLOW, SchedulerChoice(name="dpmpp_2m", karras=True), "no option 'karras' for models that predict a flow"),
        (FLOW, SchedulerChoice(name="dpmpp_2m", timesteps=(900.0, 1.0)), "no option 'timesteps' for models that"),
        (FLOW, SchedulerChoice(name="euler"), {"shift": 3.0}),
        (IPNDMScheduler(), SchedulerChoice(name="euler"), {"_class_name": "EulerDiscreteScheduler"}),
        (NOISE, SchedulerChoice(name="ddim", shift=2.0), "no option 'shift'"),
        (NOISE, SchedulerChoice(name="euler", sde=True), "no option 'algorithm_type'|no option 'sde'"),
    ],
)
def test_a_scheduler_has_the_options_of_the_choice(own: Any, choice: Any, made: Any) -> None:
    """Options of the model's own configuration that exclude them do not stay."""
    if isinstance(made, str):
        with pytest.raises(ModelUnavailable, match=made):
            make_scheduler(choice, own)
    else:
        scheduler = make_scheduler(choice, own)
        config = {**scheduler.config, "_class_name": type(scheduler).__name__}
        assert {option: config[option] for option in made} == made


@pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)
def test_every_name_that_people_use_makes_a_scheduler() -> None:
    """Of models that predict noise, and of those that predict a flow where there is one."""
    noise = DDIMScheduler(beta_schedule="scaled_linear")
    names = ("euler", "euler_a", "heun", "dpm2", "dpm2_a", "dpmpp_2m", "dpmpp_2s", "dpmpp_sde", "ddim", "lcm", "unipc")
    for name in names:
        assert make_scheduler(SchedulerChoice(name=name), noise) is not None
        of_flow = named_choice(name, True)
        if misfit(str(of_flow.name), True) is None:
            assert make_scheduler(SchedulerChoice(name=name), FLOW) is not None
