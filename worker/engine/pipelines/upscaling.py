"""Videos in longer sides: what pipelines that enlarge one get of it, and which of them are served."""

from collections.abc import Iterable
from typing import Any

from PIL import Image, ImageOps

from shared.architectures.registry import UPSCALERS
from shared.config.upscaling import source_side
from shared.errors import InferenceFailed
from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.model_facts import latent_cell


def check_upsampler(pipelines: Iterable[Pipeline]) -> None:
    """Raise `ValueError` for an upsampler of latents that makes more frames, or sides of another factor than the one
    that its pipeline has in `UPSCALERS`."""
    for pipeline in pipelines:
        config = getattr(getattr(pipeline, "latent_upsampler", None), "config", None)
        if config is None:
            continue
        factor = UPSCALERS[type(pipeline).__name__][0]
        if config.temporal_upsample:
            raise ValueError("its latent_upsampler makes more frames, which no task does; use a spatial one")
        made = config.rational_spatial_scale if getattr(config, "use_rational_resampler", False) else factor
        if made != factor:
            raise ValueError(f"its latent_upsampler makes sides {made:g} times as long; use one of factor {factor:g}")


def factor_of(pipeline: Pipeline, job: Job) -> float:
    """Return how many times as long a pipeline makes the sides of an image or a video; older APIs name no factor."""
    return job.upscale_factor or UPSCALERS[type(pipeline).__name__][0]


def source_size(pipeline: Pipeline, job: Job) -> tuple[int, int]:
    """Return width and height of the image or video that a pipeline enlarges to the size of a job.

    Raises `InferenceFailed` for a factor that it does not have.
    """
    factors = UPSCALERS[type(pipeline).__name__]
    if factor_of(pipeline, job) not in factors:
        allowed = ", ".join(f"{one:g}" for one in factors)
        message = f"upscale_factor: model {job.model!r} takes {allowed}, not {job.upscale_factor:g}"
        raise InferenceFailed(message, param="upscale_factor")
    factor, cell = factor_of(pipeline, job), latent_cell(pipeline)
    return source_side(job.width, factor, cell), source_side(job.height, factor, cell)


def enlarged_video(pipeline: Pipeline, job: Job, video: tuple[Image.Image, ...]) -> dict[str, Any]:
    """Return the arguments of a call that enlarges a video: its frames in the size that becomes that of the job.

    Raises `InferenceFailed` for a number of frames that the pipeline would cut.
    """
    if job.task is not Task.UPSCALE_VIDEO:
        return {}
    names = ("vae_temporal_compression_ratio", "vae_scale_factor_temporal")
    group = next((getattr(pipeline, name) for name in names if hasattr(pipeline, name)), 1)
    if (job.frames - 1) % group:
        message = f"frames: model {job.model!r} takes a multiple of {group} plus 1, not {job.frames}"
        raise InferenceFailed(f"{message}; frames_multiple of its limits is to be {group}", param="frames")
    size = source_size(pipeline, job)
    frames = [one if one.size == size else ImageOps.fit(one, size, Image.Resampling.LANCZOS) for one in video]
    return {"video": frames, "width": size[0], "height": size[1], "resolution_scale": factor_of(pipeline, job)}
