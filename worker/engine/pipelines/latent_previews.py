"""Previews: what the running latents of a picture look like, decoded small at a few of its steps.

They are taken in the picture's own greenlet, by the callback that its pipeline calls after a step, and decoded at the
VAE's meeting point, together with the previews of companions that are as far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
import torch

from shared.job import Job
from worker.engine.pipelines.call_arguments import to_pixels
from worker.engine.pipelines.clones import Pipeline, StepCounter
from worker.engine.protocol import Pixels

log = structlog.get_logger()

LARGEST_SIDE = 64
"""Of the latents that are decoded, in cells of 8 pixels with most VAEs: 512 pixels, some 10 ms of a large GPU."""

Callback = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]


def preview_steps(steps: int, count: int) -> tuple[int, ...]:
    """Return after which of `steps` the `count` previews are taken, the first step being 1: evenly, and not the last.

    Fewer where there are not as many steps before the last.
    """
    count = min(count, max(0, steps - 1))
    return tuple(max(1, (at * steps) // (count + 1)) for at in range(1, count + 1))


def preview_callback(job: Job, steps: StepCounter) -> Callback:
    """Return what a pipeline is to call after each step so that `steps` gets the previews that `job` asks for."""

    def after_step(pipeline: Any, index: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        total = getattr(pipeline, "num_timesteps", None) or job.steps
        if index + 1 in preview_steps(total, job.previews):
            _take(pipeline, job, steps, tensors.get("latents"))
        return {}

    return after_step


def _take(pipeline: Pipeline, job: Job, steps: StepCounter, latents: torch.Tensor | None) -> None:
    steps.previewing = True
    try:
        cells = None if latents is None else _cells(pipeline, job, latents)
        if cells is not None:
            steps.previews.append(_decoded(pipeline.vae, cells))
    except torch.AcceleratorError:
        raise
    except Exception as error:  # whatever a VAE makes of unfinished latents, the picture goes on
        log.warning("preview_failed", pipeline=type(pipeline).__name__, error=type(error).__name__)
    finally:
        steps.previewing = False


def _cells(pipeline: Pipeline, job: Job, latents: torch.Tensor) -> torch.Tensor | None:
    """Return the latents as the VAE takes them, [1, channels, (1,) height, width].

    None where they are of a kind that only the pipeline itself can bring into that form.
    """
    vae = pipeline.vae
    if getattr(vae, "bn", None) is not None:
        return _unpatched(pipeline, job, latents)
    if latents.ndim == 3:
        unpack = getattr(pipeline, "_unpack_latents", None)
        if unpack is None:
            return None
        latents = unpack(latents, job.height, job.width, pipeline.vae_scale_factor)
    channels = getattr(vae.config, "latent_channels", None) or getattr(vae.config, "z_dim", None)
    fits = latents.ndim in (4, 5) and latents.shape[0] == 1 and latents.shape[1] == channels
    if not fits or (latents.ndim == 5 and latents.shape[2] != 1):
        return None
    return _unscaled(pipeline, latents)


def _unpatched(pipeline: Pipeline, job: Job, latents: torch.Tensor) -> torch.Tensor | None:
    """Return FLUX.2's latents, which are patches of 2x2 cells, normalised by statistics that its VAE keeps."""
    unpatchify = getattr(pipeline, "_unpatchify_latents", None)
    if unpatchify is None:
        return None
    if latents.ndim == 3:
        side = 2 * pipeline.vae_scale_factor
        latents = latents.transpose(1, 2).unflatten(2, (job.height // side, job.width // side))
    vae = pipeline.vae
    mean, variance = (values.to(latents).view(1, -1, 1, 1) for values in (vae.bn.running_mean, vae.bn.running_var))
    cells: torch.Tensor = unpatchify(latents * (variance + vae.config.batch_norm_eps).sqrt() + mean)
    return cells


def _decoded(vae: Any, cells: torch.Tensor) -> Pixels:
    """Return a small picture of the latents as uint8 [height, width, 3]."""
    height, width = cells.shape[-2:]
    shrink = LARGEST_SIDE / max(height, width)
    if shrink < 1:
        size = (max(1, round(height * shrink)), max(1, round(width * shrink)))
        flat = cells.reshape(1, -1, height, width).float()
        small = torch.nn.functional.interpolate(flat, size=size, mode="area")
        cells = small.reshape(*cells.shape[:-2], *size)
    image = vae.decode(cells.to(vae.dtype), return_dict=False)[0]
    image = image[:, :, 0] if image.ndim == 5 else image
    return to_pixels((image[0] / 2 + 0.5).clamp(0, 1))


def _unscaled(pipeline: Pipeline, cells: torch.Tensor) -> torch.Tensor:
    """Return latents as the VAE made them: undone is what they were scaled by for denoising."""
    config = pipeline.vae.config
    scale = getattr(config, "scaling_factor", None) or 1.0
    mean, deviation = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if mean is not None and deviation is not None:
        shape = (1, -1, *(1 for _ in cells.shape[2:]))
        mean, deviation = (torch.tensor(values).to(cells).view(shape) for values in (mean, deviation))
        # Of those that have them, only the pipelines of XL scale as well.
        return cells * deviation / (scale if type(pipeline).__name__.startswith("StableDiffusionXL") else 1.0) + mean
    return cells / scale + (getattr(config, "shift_factor", None) or 0.0)
