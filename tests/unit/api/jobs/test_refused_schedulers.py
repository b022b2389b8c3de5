"""Every scheduler that a request cannot choose is refused with the reason, and with those that it can."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from api.jobs.model_limits import field_faults
from api.jobs.request import parse
from api.jobs.resolve import resolve_for_model
from shared.config.catalog import Catalog
from shared.config.model_facts import ModelFacts
from shared.config.model_spec import ModelSpec
from shared.config.noise_schedulers import FLOW_OPTION, NOISE_ONLY, OwnScheduler, misfit
from shared.config.request_limits import Defaults, Limits
from shared.config.scheduler_choices import named_choice
from shared.errors import InvalidRequest

FLOW = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler")
SHORT = ("DDIM", "DDPM", "Euler", "Euler a", "Heun", "LCM", "LMS", "DPM2", "DPM2 a", "DPM++ 2M", "DPM++ SDE", "UniPC")
NAMES = (*SHORT, "PNDM", "DEIS", "TCD", "SA-Solver", *FLOW, *sorted(NOISE_ONLY | FLOW_OPTION), "Nothing")
OWN = {"flow": ("FlowMatchEulerDiscreteScheduler", True), "noise": ("PNDMScheduler", False), "unknown": (None, None)}


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., ModelSpec]:
    """Return a model in a folder with its own scheduler."""

    def build(kind: str, listed: tuple[str, ...] = (), default: str | None = None) -> ModelSpec:
        class_name = OWN[kind][0]
        if class_name is not None:
            (tmp_path / "scheduler").mkdir()
            (tmp_path / "scheduler/scheduler_config.json").write_text(json.dumps({"_class_name": class_name}))
        return ModelSpec(id="m", source=str(tmp_path), schedulers=listed, defaults=Defaults(scheduler=default))

    return build


def refusal(spec: ModelSpec, name: str | None) -> str | None:
    """Return why a scheduler is refused, None if it is not."""
    try:
        resolve_for_model(parse({"model": "m", "prompt": "x", "scheduler": name}), spec, "t", 0)
    except InvalidRequest as error:
        (fault,) = error.faults
        assert fault.param == "scheduler"
        return fault.message
    return None


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("listed", [(), ("UniPCMultistepScheduler",), NAMES])
def test_each_refusal_has_a_reason_and_says_what_can_be_sent(
    kind: str, listed: tuple[str, ...], model: Callable[..., ModelSpec]
) -> None:
    spec, (own, is_flow) = model(kind, listed), OWN[kind]
    allowed = ", ".join(spec.usable_schedulers)
    remedy = f"it must be one of: {allowed}" if listed else "send none, for the model's default"
    usable = {own, *(named_choice(one, is_flow).name for one in spec.usable_schedulers)}
    for name in NAMES:
        meant = named_choice(name, is_flow).name
        assert meant is not None
        reason = misfit(meant, is_flow) or f"model 'm' does not list {meant}"
        assert refusal(spec, name) == (None if meant in usable else f"scheduler: {reason}; {remedy}")


def test_the_reason_of_ddim_for_a_model_that_predicts_a_flow(model: Callable[..., ModelSpec]) -> None:
    spec = model("flow", ("DDIM", "UniPC", "Heun"))
    expected = "scheduler: DDIMScheduler removes noise, and the model predicts a flow; it must be one of: UniPC, Heun"
    assert refusal(spec, "DDIM") == expected


REASON = "LMSDiscreteScheduler needs the package scipy"
LACKING = dict.fromkeys(("LMS Karras", "LMSDiscreteScheduler"), REASON)


@pytest.mark.parametrize("name", ["LMS Karras", "klms", "LMSDiscreteScheduler"])
def test_a_scheduler_that_the_worker_cannot_make_is_refused_by_all_its_names(
    name: str, model: Callable[..., ModelSpec]
) -> None:
    spec = model("noise", ("LMS Karras", "DDIM"))
    assert (refusal(spec, name), tuple(spec.usable_schedulers)) == (None, ("LMS Karras", "DDIM"))
    spec = spec.with_facts(ModelFacts(unusable_schedulers=LACKING))
    assert refusal(spec, name) == f"scheduler: {REASON}; it must be one of: DDIM"
    assert tuple(spec.usable_schedulers) == ("DDIM",)
    assert refusal(spec, None) is None


def test_options_that_the_worker_lacks_leave_the_class(model: Callable[..., ModelSpec]) -> None:
    unusable = {"DPM++ 2M Beta": "DPMSolverMultistepScheduler needs scipy"}
    facts = ModelFacts(unusable_schedulers=unusable, unusable_options={"beta": "needs the package scipy"})
    spec = model("noise", ("DPM++ 2M Beta", "Euler")).with_facts(facts)
    assert refusal(spec, "DPM++ 2M Beta") == f"scheduler: {unusable['DPM++ 2M Beta']}; it must be one of: Euler"
    assert refusal(spec, "Euler Beta") == "scheduler: 'beta' needs the package scipy"
    assert refusal(spec, "DPM++ 2M Karras") is None
    assert refusal(spec, "Euler") is None


def test_a_default_that_the_worker_cannot_make_is_refused_for_requests_without_a_scheduler(
    model: Callable[..., ModelSpec],
) -> None:
    spec = model("noise", ("DDIM",), "LMS Karras").with_facts(ModelFacts(unusable_schedulers=LACKING))
    assert refusal(spec, None) == f"scheduler: {REASON}; it must be one of: DDIM"
    assert refusal(spec, "DDIM") is None


def test_a_default_that_no_worker_can_make_is_for_the_operator(model: Callable[..., ModelSpec]) -> None:
    """A request cannot choose another one."""
    spec = model("noise", (), "LMS Karras").with_facts(ModelFacts(unusable_schedulers=LACKING))
    message = refusal(spec, None)
    assert message is not None
    assert "send none" not in message
    assert message.endswith("is the default of model 'm', so the operator must install what it needs, or change it")


SD = {"num_train_timesteps": 1000, "steps_offset": 1, "beta_schedule": "scaled_linear"}


@pytest.mark.parametrize(
    ("config", "scheduler", "most"),
    [
        ({"_class_name": "PNDMScheduler", **SD}, None, 999),
        ({"_class_name": "PNDMScheduler", **SD}, {"spacing": "trailing"}, 1000),
        ({"_class_name": "PNDMScheduler", **SD, "timestep_spacing": "linspace"}, None, 1000),
        ({"_class_name": "EulerDiscreteScheduler", **SD, "timestep_spacing": "leading"}, "ddim", 999),
        ({"_class_name": "EulerDiscreteScheduler", **SD, "timestep_spacing": "leading"}, None, None),
        ({"_class_name": "PNDMScheduler", **SD}, "lcm", 50),
        ({"_class_name": "LCMScheduler", **SD, "original_inference_steps": 100}, None, 100),
        ({"_class_name": "DDIMScheduler"}, None, None),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}, None, None),
    ],
)
def test_more_steps_than_a_scheduler_has_on_a_model_are_refused(
    tmp_path: Path, config: Mapping[str, Any], scheduler: Any, most: int | None
) -> None:
    """Whatever the model's `max_steps` allows: diffusers fails with them."""
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler/scheduler_config.json").write_text(json.dumps(config))
    limits = Limits(max_steps=2000)
    spec = ModelSpec(id="m", source=str(tmp_path), schedulers=("ddim", "lcm"), limits=limits)

    def faults(steps: int) -> list[tuple[str | None, str]]:
        request = parse({"model": "m", "prompt": "a red circle", "steps": steps, "scheduler": scheduler})
        return [(fault.param, fault.message) for fault in field_faults(request, spec)]

    assert faults(most or 2000) == []
    if most is not None:
        ((param, message),) = faults(most + 1)
        assert (param, f"at most {most} on model 'm', not {most + 1}" in message) == ("steps", True)


def test_facts_that_are_gone_are_forgotten() -> None:
    spec = ModelSpec(id="m", source="org/m", aliases=("other",))
    catalog = Catalog((spec,))
    catalog.learn({"m": ModelFacts(unusable_schedulers=LACKING)})
    version = catalog.version
    assert catalog.get("other").facts.unusable_schedulers == LACKING
    catalog.learn({})
    assert (catalog.get("other"), catalog.get("m"), list(catalog)) == (spec, spec, [spec])
    assert catalog.get("m").facts.unusable_schedulers == {}
    assert catalog.version > version


def test_a_model_on_the_hub_refuses_what_its_worker_found_not_to_fit() -> None:
    spec = ModelSpec(id="m", source="org/flux", schedulers=("DDIM", "Euler"))
    assert refusal(spec, "DDIM") is None
    own = OwnScheduler("FlowMatchEulerDiscreteScheduler", is_flow=True)
    spec = spec.with_facts(ModelFacts(own_scheduler=own))
    message = refusal(spec, "DDIM")
    assert message is not None
    assert "DDIMScheduler removes noise, and the model predicts a flow; it must be one of: Euler" in message
    assert refusal(spec, "Euler") is None
