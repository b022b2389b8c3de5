"""Previews: an image's latents at a few of its steps, decoded at a small size.

The pipeline's callback takes them in the image task's greenlet. The VAE is a module proxy, so previews of batch mates
at the same step share a forward.
"""

from collections.abc import Callable
from typing import Any

import structlog
import torch

from shared.job import Job
from worker.engine.errors import is_device_lost
from worker.engine.pipelines.call_results import to_pixels
from worker.engine.pipelines.clones import Pipeline, StepCounter
from worker.engine.pipelines.modular import is_modular
from worker.engine.pipelines.task_pipelines import call_parameters

log = structlog.get_logger()

LARGEST_SIDE = 64
"""Of decoded latents, in cells of 8 pixels with most VAEs: 512 pixels, about 10 ms of a large GPU."""


def preview_steps(steps: int, count: int) -> tuple[int, ...]:
    """Return the steps, the first being 1, after which `count` previews are taken: evenly spread, not the last.

    There are fewer previews if there are fewer steps before the last.
    """
    count = min(count, max(0, steps - 1))
    return tuple(max(1, (at * steps) // (count + 1)) for at in range(1, count + 1))


def add_previews(
    pipeline: Pipeline,
    arguments: dict[str, Any],
    job: Job,
    steps: StepCounter,
    replaying: Callable[[], bool] = lambda: False,
) -> None:
    """Let a pipeline's call take the job's previews, if it can, but while `replaying`."""
    if job.previews and not job.task.makes_audio and "callback_on_step_end" in call_parameters(pipeline):
        arguments["callback_on_step_end"] = preview_callback(job, steps, replaying)


def preview_callback(
    job: Job, steps: StepCounter, replaying: Callable[[], bool] = lambda: False
) -> Callable[..., dict[str, Any]]:
    """Return a pipeline's `callback_on_step_end` that adds the job's previews to `steps`, but while `replaying`."""

    def after_step(pipeline: Any, index: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        # Of the calls whose steps are planned, this can be the second.
        before = steps.loop_start if steps.planned else 0
        total = steps.planned or getattr(pipeline, "num_timesteps", None) or job.steps
        if before + index + 1 in preview_steps(total, job.previews) and not replaying():
            _add_preview(pipeline, job, steps, tensors.get("latents"))
        return {}

    return after_step


def _add_preview(pipeline: Pipeline, job: Job, steps: StepCounter, latents: torch.Tensor | None) -> None:
    steps.previewing = True
    try:
        image = decode_small(pipeline, job, latents)
        if image is not None:
            steps.previews.append(to_pixels(image[0]))
    except Exception as error:  # a VAE can fail on unfinished latents; the image continues
        if is_device_lost(error):
            raise
        log.warning("preview_failed", pipeline=type(pipeline).__name__, error=type(error).__name__)
    finally:
        steps.previewing = False


def decode_small(pipeline: Pipeline, job: Job, latents: torch.Tensor | None) -> torch.Tensor | None:
    """Return a small image of latents, [1, 3, height, width] of 0 to 1; None for those that cannot be decoded yet."""
    vae_latents = None if latents is None else _to_vae_latents(pipeline, job, latents)
    return None if vae_latents is None else _decode_small(pipeline.vae, vae_latents)


def _to_vae_latents(pipeline: Pipeline, job: Job, latents: torch.Tensor) -> torch.Tensor | None:
    """Return the latents as the VAE takes them, [1, channels, (1,) height, width].

    None for latents that only the pipeline's own code can convert.
    """
    vae = pipeline.vae
    if getattr(vae, "bn", None) is not None:
        return _unpatchify(pipeline, job, latents)
    if latents.ndim == 3:
        unpack = getattr(pipeline, "_unpack_latents", _unpack_patches if is_modular(pipeline) else None)
        if unpack is None:
            return None
        latents = unpack(latents, job.height, job.width, pipeline.vae_scale_factor)
        if latents.ndim == 4 and "temperal_downsample" in vae.config:  # of a VAE for videos, with an axis of time
            latents = latents.unsqueeze(2)
    channels = getattr(vae.config, "latent_channels", None) or getattr(vae.config, "z_dim", None)
    matches = latents.ndim in (4, 5) and latents.shape[0] == 1 and latents.shape[1] == channels
    if not matches or (latents.ndim == 5 and latents.shape[2] != 1):
        return None
    return _unscale(pipeline, latents)


def _unpack_patches(latents: torch.Tensor, height: int, width: int, vae_scale_factor: int) -> torch.Tensor:
    """Return packed latents [1, rows * columns, 4 * channels] as [1, channels, 2 * rows, 2 * columns].

    The blocks of modular pipelines that pack latents do it as FLUX does, in patches of 2 x 2.
    """
    sides = height // (2 * vae_scale_factor), width // (2 * vae_scale_factor)
    patches: torch.Tensor = latents.unflatten(2, (-1, 2, 2)).unflatten(1, sides)
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def _unpatchify(pipeline: Pipeline, job: Job, latents: torch.Tensor) -> torch.Tensor | None:
    """Convert FLUX.2's latents: patches of 2x2 cells, normalised by the VAE's batch statistics."""
    unpatchify = getattr(pipeline, "_unpatchify_latents", None)
    if unpatchify is None:
        return None
    if latents.ndim == 3:
        side = 2 * pipeline.vae_scale_factor
        latents = latents.transpose(1, 2).unflatten(2, (job.height // side, job.width // side))
    vae = pipeline.vae
    mean, variance = (values.to(latents).view(1, -1, 1, 1) for values in (vae.bn.running_mean, vae.bn.running_var))
    unpatched: torch.Tensor = unpatchify(latents * (variance + vae.config.batch_norm_eps).sqrt() + mean)
    return unpatched


def _unscale(pipeline: Pipeline, latents: torch.Tensor) -> torch.Tensor:
    """Undo the scaling of latents for denoising."""
    config = pipeline.vae.config
    scale = getattr(config, "scaling_factor", None) or 1.0
    mean, deviation = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if mean is not None and deviation is not None:
        shape = (1, -1, *(1 for _ in latents.shape[2:]))
        mean, deviation = (torch.tensor(values).to(latents).view(shape) for values in (mean, deviation))
        # Of pipelines with these statistics, only XL's scale too.
        return latents * deviation / (scale if type(pipeline).__name__.startswith("StableDiffusionXL") else 1.0) + mean
    return latents / scale + (getattr(config, "shift_factor", None) or 0.0)


def _decode_small(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    height, width = latents.shape[-2:]
    shrink = LARGEST_SIDE / max(height, width)
    if shrink < 1:
        size = (max(1, round(height * shrink)), max(1, round(width * shrink)))
        flat = latents.reshape(1, -1, height, width).float()
        small = torch.nn.functional.interpolate(flat, size=size, mode="area")
        latents = small.reshape(*latents.shape[:-2], *size)
    image: torch.Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
    image = image[:, :, 0] if image.ndim == 5 else image
    return (image / 2 + 0.5).clamp(0, 1)
