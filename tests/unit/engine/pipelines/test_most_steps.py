"""The most steps that requests can have, compared with diffusers' own schedulers."""

from __future__ import annotations

import diffusers
import pytest
import torch

from shared.config.noise_schedulers import DISTILLED, LEVELS, described, most_steps

SD = {"num_train_timesteps": 1000, "steps_offset": 1, "clip_sample": False, "skip_prk_steps": True}
NAMES = sorted((LEVELS | DISTILLED) - {"CogVideoXDPMScheduler", "DDIMInverseScheduler"})
"""Not one whose step takes what its pipeline keeps of the last, and one that ends with the highest level."""


def first_step(name: str, steps: int, spacing: str) -> None:
    scheduler = getattr(diffusers, name).from_config({**SD, "timestep_spacing": spacing})
    scheduler.set_timesteps(steps)
    scheduler.step(torch.zeros(1, 4, 2, 2), scheduler.timesteps[0], torch.zeros(1, 4, 2, 2))


@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("name", NAMES)
def test_a_scheduler_has_as_many_steps_and_fails_with_more(name: str, spacing: str) -> None:
    most = most_steps(name, described({**SD, "timestep_spacing": spacing}, name))
    assert most is not None
    first_step(name, most, spacing)
    if (name, spacing) != ("PNDMScheduler", "trailing"):  # it repeats noise levels
        with pytest.raises((IndexError, ValueError)):
            first_step(name, most + 1, spacing)
