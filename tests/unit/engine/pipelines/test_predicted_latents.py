"""What a denoiser's output predicts: the latents without noise, for noise schedulers of all kinds."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from harness.engine import DIFFUSERS_AND_NUMPY

from worker.engine.pipelines.candidate_marks import predicted

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)

STEPS = 6
KINDS = ("epsilon", "v_prediction")
OF_ALPHAS = ("DDIMScheduler", "DDPMScheduler", "LCMScheduler", "PNDMScheduler", "EulerAncestralDiscreteScheduler")
OF_SIGMAS = ("EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
SCHEDULERS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"prediction_type": kind}) for name in OF_ALPHAS for kind in KINDS),
    *((name, {"prediction_type": kind, "use_karras_sigmas": True}) for name in OF_SIGMAS for kind in KINDS),
    ("DPMSolverMultistepScheduler", {"prediction_type": "flow_prediction", "use_flow_sigmas": True}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    ("FlowMatchHeunDiscreteScheduler", {}),
]


def noised(scheduler: Any, image: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    if hasattr(scheduler, "add_noise"):
        return torch.as_tensor(scheduler.add_noise(image, noise, time))
    return torch.as_tensor(scheduler.scale_noise(image, time, noise))


def perfect_output(scheduler: Any, image: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """Return the output of a denoiser that knows the image."""
    kind = getattr(scheduler.config, "prediction_type", "flow_prediction")
    if kind == "epsilon":
        return noise
    if kind == "flow_prediction":
        return noise - image
    one, none = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    a, s = noised(scheduler, one, none, time), noised(scheduler, none, one, time)
    norm = (a**2 + s**2).sqrt()
    return noise * a / norm - image * s / norm


@pytest.mark.parametrize(("name", "config"), SCHEDULERS)
def test_a_perfect_output_predicts_the_image_at_every_step(name: str, config: dict[str, Any]) -> None:
    scheduler = getattr(diffusers, name)(**config)
    scheduler.set_timesteps(STEPS)
    generator = torch.Generator().manual_seed(1)
    image, noise = (torch.randn(1, 4, 8, 8, generator=generator) for _ in range(2))
    for time in scheduler.timesteps:
        sample = noised(scheduler, image, noise, time.reshape(1))
        output = perfect_output(scheduler, image, noise, time.reshape(1))
        found = predicted(scheduler, output, time, sample)
        assert found is not None
        assert torch.allclose(found, image, atol=1e-3)
        scheduler.step(output, time, sample)


def test_a_scheduler_that_does_not_tell_predicts_nothing() -> None:
    class Other:
        config: Any = None

    assert predicted(Other(), torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 4, 8, 8)) is None
    assert predicted(diffusers.DDIMScheduler(), None, 1, torch.zeros(1, 4, 8, 8)) is None
