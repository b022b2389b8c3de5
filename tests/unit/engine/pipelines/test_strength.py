"""Steps by strength: plain diffusers' number for every strength and number of steps, and at least one."""

from __future__ import annotations

from typing import Any, NamedTuple

import diffusers
import pytest
from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler, HeunDiscreteScheduler
from harness.engine import DIFFUSERS_AND_NUMPY, a_job

from worker.engine.pipelines.call_arguments import effective_strength

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)

STRENGTHS = [percent / 100 for percent in range(1, 101)]
STEPS = range(1, 51)

# Rounded down, and then without a step in plain diffusers, which fails: Stable Diffusion. Rounded up: flow models.
FAMILIES = {
    FlowMatchEulerDiscreteScheduler: (
        *("FluxImg2ImgPipeline", "FluxInpaintPipeline", "FluxFillPipeline", "Flux2KleinInpaintPipeline"),
        *("StableDiffusion3Img2ImgPipeline", "StableDiffusion3InpaintPipeline"),
        *("QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline"),
        *("ZImageImg2ImgPipeline", "ZImageInpaintPipeline", "ChromaImg2ImgPipeline"),
    ),
    EulerDiscreteScheduler: (
        *("StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
        *("StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline"),
    ),
    HeunDiscreteScheduler: ("StableDiffusionXLImg2ImgPipeline",),  # two forwards a step
}


class Strength(NamedTuple):
    """Steps and strength of a job, the strength of its call, and the fewest steps that the queue expects."""

    steps: int
    strength: float
    used: float
    fewest: int


@pytest.fixture(scope="module")
def strengths() -> list[Strength]:
    job = a_job("x", strength=1.0)
    jobs = [job.model_copy(update={"steps": steps, "strength": value}) for steps in STEPS for value in STRENGTHS]
    return [
        Strength(job.steps, job.strength or 0.0, effective_strength(job), job.computed_steps_per_image) for job in jobs
    ]


def forwards(pipeline: Any, steps: int, strength: float) -> int:
    """Return how many times a pipeline calls its denoiser."""
    timesteps, _ = pipeline.get_timesteps(num_inference_steps=steps, strength=strength, device="cpu")
    return len(timesteps)


@pytest.mark.parametrize(
    ("scheduler", "name"), [(scheduler, name) for scheduler, names in FAMILIES.items() for name in names]
)
def test_a_job_takes_as_many_steps_as_in_plain_diffusers(scheduler: Any, name: str, strengths: list[Strength]) -> None:
    """And one where plain diffusers fails for want of a step. The queue expects no more of them."""
    pipeline: Any = object.__new__(getattr(diffusers, name))
    pipeline.__dict__["scheduler"] = scheduler()
    others = []
    for steps, strength, used, fewest in strengths:
        if strength == STRENGTHS[0]:
            pipeline.scheduler.set_timesteps(steps)
        plain = forwards(pipeline, steps, strength)
        ours = plain if used == strength else forwards(pipeline, steps, used)
        if ours != (plain or 1) or fewest > ours:
            others.append((steps, strength, plain, ours, fewest))
    assert not others, f"(steps, strength, plain, ours, fewest) of {len(others)}: {others[:5]}"
