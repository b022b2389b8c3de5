"""What a loaded model knows of itself that requests are checked with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from shared.architectures.registry import FIXED_RATES, UPSCALERS
from shared.config.model_facts import ModelFacts
from shared.config.noise_schedulers import OwnScheduler, described
from shared.config.size_steps import size_step
from worker.engine.pipelines.chosen_schedulers import unusable_options
from worker.engine.pipelines.clones import Pipeline


def facts_of(folder: Path, templates: Iterable[Pipeline], unusable_schedulers: Mapping[str, str]) -> ModelFacts:
    """Return the facts of a model with files in `folder`, of which parts can be in other repositories."""
    pipelines = list(templates)
    step = size_step(folder)
    if step == 1:
        step = math.lcm(*map(side_step, pipelines))
    own = next((found for one in pipelines if (found := getattr(one, "scheduler", None)) is not None), None)
    return ModelFacts(
        size_step=step,
        fps=next((fps for one in pipelines if (fps := FIXED_RATES.get(type(one).__name__))), None),
        upscale_factors=next((factors for one in pipelines if (factors := upscale_factors(one))), ()),
        own_scheduler=OwnScheduler() if own is None else described(own.config, type(own).__name__),
        unusable_schedulers=dict(unusable_schedulers),
        unusable_options=unusable_options(),
    )


def upscale_factors(pipeline: Pipeline) -> tuple[float, ...]:
    """Return how many times as long a pipeline can make the sides of an image or a video; none if it upscales none."""
    return UPSCALERS.get(type(pipeline).__name__, ())


def side_step(pipeline: Pipeline) -> int:
    """Return what a pipeline rounds the sides of images to multiples of; 1 if it does not say."""
    return latent_cell(pipeline) * int(next(iter(upscale_factors(pipeline)), 1))


def latent_cell(pipeline: Pipeline) -> int:
    """Return what a pipeline rounds the sides of its input to multiples of; 1 if it does not say."""
    names = ("image_processor", "video_processor") if upscale_factors(pipeline) else ("image_processor",)
    processor = next((found for name in names if (found := getattr(pipeline, name, None)) is not None), None)
    return int(getattr(processor, "config", {}).get("vae_scale_factor", 1))
