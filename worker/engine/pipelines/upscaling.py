"""Videos in longer sides: what pipelines that enlarge one get of it, and which of them are served."""

from collections.abc import Iterable
from typing import Any

from PIL import Image, ImageOps

from shared.architectures.registry import UPSCALERS
from shared.errors import InferenceFailed
from shared.job import Job
from shared.job_fields import Task
from worker.engine.pipelines.clones import Pipeline


def check_upsampler(pipelines: Iterable[Pipeline]) -> None:
    """Raise `ValueError` for an upsampler of latents that makes more frames, or sides of another factor than the one
    that its pipeline has in `UPSCALERS`."""
    for pipeline in pipelines:
        config = getattr(getattr(pipeline, "latent_upsampler", None), "config", None)
        if config is None:
            continue
        factor = UPSCALERS[type(pipeline).__name__]
        if config.temporal_upsample:
            raise ValueError("its latent_upsampler makes more frames, which no task does; use a spatial one")
        made = config.rational_spatial_scale if getattr(config, "use_rational_resampler", False) else factor
        if made != factor:
            raise ValueError(f"its latent_upsampler makes sides {made:g} times as long; use one of factor {factor}")


def enlarged_video(pipeline: Pipeline, job: Job, video: tuple[Image.Image, ...]) -> dict[str, Any]:
    """Return the arguments of a call that enlarges a video: its frames in the size that becomes that of the job.

    Raises `InferenceFailed` for a number of frames that the pipeline would cut.
    """
    if job.task is not Task.UPSCALE_VIDEO:
        return {}
    group = getattr(pipeline, "vae_temporal_compression_ratio", 1)
    if (job.frames - 1) % group:
        message = f"frames: model {job.model!r} takes a multiple of {group} plus 1, not {job.frames}"
        raise InferenceFailed(f"{message}; frames_multiple of its limits is to be {group}", param="frames")
    factor = UPSCALERS[type(pipeline).__name__]
    size = (job.width // factor, job.height // factor)
    frames = [one if one.size == size else ImageOps.fit(one, size, Image.Resampling.LANCZOS) for one in video]
    return {"video": frames, "width": size[0], "height": size[1]}
