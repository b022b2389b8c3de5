"""Names and options of noise schedulers, as requests and models files have them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from shared.config.noise_schedulers import OwnScheduler
from shared.config.scheduler_choices import Scheduler, SchedulerChoice, choice_of, option_faults

READ: TypeAdapter[Any] = TypeAdapter(Scheduler)
DPM = "DPMSolverMultistepScheduler"


@pytest.mark.parametrize(
    ("name", "is_flow", "chosen"),
    [
        ("Euler a", False, {"name": "EulerAncestralDiscreteScheduler"}),
        ("euler_a", False, {"name": "EulerAncestralDiscreteScheduler"}),
        ("K_EULER_ANCESTRAL", False, {"name": "EulerAncestralDiscreteScheduler"}),
        ("k_euler", False, {"name": "EulerDiscreteScheduler"}),
        ("euler", True, {"name": "FlowMatchEulerDiscreteScheduler"}),
        ("heun", True, {"name": "FlowMatchHeunDiscreteScheduler"}),
        ("K_EULER", None, {"name": "euler"}),
        ("Euler Karras", None, {"name": "euler", "karras": True}),
        ("euler_a", None, {"name": "EulerAncestralDiscreteScheduler"}),
        ("EulerDiscreteScheduler", True, {"name": "EulerDiscreteScheduler"}),
        ("DPM++ 2M Karras", False, {"name": DPM, "karras": True}),
        ("dpmpp_2m_sde_karras", False, {"name": DPM, "karras": True, "sde": True}),
        ("DPM++ 2M SDE Exponential", None, {"name": DPM, "exponential": True, "sde": True}),
        ("DPM++ SDE", None, {"name": "DPMSolverSinglestepScheduler", "sde": True}),
        ("euler_sgm_uniform", False, {"name": "EulerDiscreteScheduler", "spacing": "trailing"}),
        ("euler_normal", False, {"name": "EulerDiscreteScheduler"}),
        ("UniPC", True, {"name": "UniPCMultistepScheduler"}),
        ("PLMS", False, {"name": "PNDMScheduler"}),
        ("KLMS", False, {"name": "LMSDiscreteScheduler"}),
        ("DPMSolverMultistep", False, {"name": DPM}),
        ("HeliosScheduler", True, {"name": "HeliosScheduler"}),
        ("nothing", False, {"name": "nothing"}),
    ],
)
def test_a_name_means_a_class_with_options(name: str, is_flow: bool | None, chosen: dict[str, Any]) -> None:
    assert choice_of(name, None, is_flow) == SchedulerChoice(**chosen)


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ({"name": "DPM++ 2M Karras", "sde": True}, {"name": DPM, "karras": True, "sde": True}),
        ({"name": "DPM++ 2M Karras", "beta": True}, {"name": DPM, "beta": True}),
        ({"name": "ddpm", "timesteps": [999, 500, 1]}, {"name": "DDPMScheduler", "timesteps": (999, 500, 1)}),
        ({"shift": 3.0}, {"shift": 3.0}),
        ({"name": "euler"}, {"name": "EulerDiscreteScheduler"}),
        (None, {}),
    ],
)
def test_options_beside_a_name_replace_those_of_the_name(value: Any, chosen: dict[str, Any]) -> None:
    read = READ.validate_python(value)
    choice = choice_of(read, None, False)
    assert choice == SchedulerChoice(**chosen)
    assert choice_of(choice.name, choice.options, False) == choice  # as a job repeats it


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "it must be a name or an object"),
        ({"name": "euler", "kerras": True}, "kerras: there is no such field"),
        ({"karras": "yes"}, "karras: Input should be a valid boolean"),
        ({"karras": True, "beta": True}, "karras and beta exclude each other"),
        ({"timesteps": [1, 2]}, "timesteps must become smaller from step to step"),
        ({"sigmas": []}, "sigmas: Tuple should have at least 1 item"),
        ({"shift": 0}, "shift: Input should be greater than 0"),
        ({"sigmas": [9, 0]}, "sigmas: 1: Input should be greater than 0"),
        ({"timesteps": ["9"]}, "timesteps: 0: Input should be a valid number"),
        ("", "a name has 1 to 64 characters"),
        ("e" * 65, "a name has 1 to 64 characters"),
    ],
)
def test_a_wrong_choice_is_named_once(value: Any, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        READ.validate_python(value)
    assert [message in error["msg"] for error in caught.value.errors()] == [True]


@pytest.mark.parametrize(
    ("choice", "own", "faults"),
    [
        ({"name": DPM, "karras": True, "sde": True}, OwnScheduler("DDIMScheduler", False), []),
        ({"name": "DDIMScheduler", "karras": True}, OwnScheduler(), ["DDIMScheduler has no option 'karras'"]),
        ({"sde": True}, OwnScheduler("DDIMScheduler", False), ["DDIMScheduler has no option 'sde'"]),
        ({"sde": True}, OwnScheduler(), []),
        ({"shift": 2.0}, OwnScheduler("FlowMatchEulerDiscreteScheduler", True), []),
        ({"name": DPM, "shift": 2.0}, OwnScheduler("DDIMScheduler", False), ["'shift' is for models that predict a"]),
        ({"name": "HeliosScheduler", "shift": 2.0}, OwnScheduler(), []),
        ({"name": DPM, "karras": True}, OwnScheduler("FlowMatchEulerDiscreteScheduler", True), ["for models that"]),
        ({"name": DPM, "shift": 2.0}, OwnScheduler("FlowMatchEulerDiscreteScheduler", True), []),
        ({"name": DPM, "shift": 2.0}, OwnScheduler("FlowMatchHeunDiscreteScheduler", True, True), ["the image's size"]),
        ({"name": "UniPCMultistepScheduler", "sigmas": (1.0,)}, OwnScheduler(), ["has no option 'sigmas'"]),
    ],
)
def test_options_that_a_scheduler_lacks_are_faults(
    choice: dict[str, Any], own: OwnScheduler, faults: list[str]
) -> None:
    found = list(option_faults(SchedulerChoice(**choice), own))
    assert len(found) == len(faults)
    assert all(expected in fault for expected, fault in zip(faults, found, strict=True))
