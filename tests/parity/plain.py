"""The results of unmodified diffusers: a job's own call of the pipeline, with `output_type="pil"`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from harness.engine import DEVICE
from parity.plain_calls import arguments, pipeline_of
from transformers import CLIPTextModel

from shared.job import Job
from worker.engine.fusion.stacking import map_tensors
from worker.engine.outputs import Audio, Output

A_LEVEL = 1 / 255
NUDGE = 1e-6


@dataclass(frozen=True)
class PlainResult:
    """One image or video: values of 0 to 1 as [(frames,) height, width, channels], and the samples of its sound.

    The values are those from which the PIL images are rounded. If a pipeline makes these in another way, the values are
    their levels, `rounded` to 8 bits; some pipelines round down.
    """

    values: np.ndarray
    rounded: bool
    audio: np.ndarray | None = None

    def difference(self, made: Output) -> float:
        """Return the largest difference to an engine's output of floats, relative to the range of the values.

        Where one is rounded to 8 bits, what rounding explains is no difference.
        """
        pixels = np.moveaxis(made.pixels, -3, -1)
        assert pixels.shape == self.values.shape, f"{pixels.shape}, not {self.values.shape}"
        slack = A_LEVEL if self.rounded else A_LEVEL / 2 if _is_rounded(pixels) else 0.0
        off = max(0.0, float(np.abs(pixels - self.values).max()) - slack)
        assert (made.audio is None) == (self.audio is None)
        if made.audio is None or self.audio is None:
            return off
        return max(off, float(np.abs(made.audio.samples - self.audio).max()))


@dataclass(frozen=True)
class PlainSound:
    """The samples of a sound, [channels, samples]."""

    values: np.ndarray

    def difference(self, made: Audio) -> float:
        """Return the largest difference to a sound of the engine."""
        assert made.samples.shape == self.values.shape, f"{made.samples.shape}, not {self.values.shape}"
        return float(np.abs(made.samples - self.values).max())


class PlainPipeline:
    """A model's folder, loaded by diffusers only."""

    def __init__(self, source: Path, device: str = DEVICE, dtype: torch.dtype = torch.float32) -> None:
        self._loaded = _load(source, dtype).to(device)
        self._loaded.set_progress_bar_config(disable=True)
        encoder = getattr(self._loaded, "text_encoder", None)
        if isinstance(encoder, CLIPTextModel) and not hasattr(encoder, "text_model"):
            vars(encoder)["text_model"] = encoder  # as before transformers 5, for `clip_skip`
        if isinstance(vae := getattr(self._loaded, "vae", None), diffusers.AutoencoderKLAllegro):
            vae.enable_tiling()  # without it, decoding is not implemented
        self._own_scheduler = getattr(self._loaded, "scheduler", None)

    def sounds(self, job: Job) -> list[PlainSound]:
        """Return all sounds of a job, each made by a call of its own."""
        pipeline = pipeline_of(self._loaded, job.task)
        pipeline.set_progress_bar_config(disable=True)
        own, made = self._own_scheduler, list[PlainSound]()
        if getattr(pipeline, "guider", None) is not None:
            pipeline.guider = pipeline.guider.new(guidance_scale=job.guidance_scale)
        for index in range(job.n):
            if own is not None:
                pipeline.scheduler = type(own).from_config(own.config)
            torch.manual_seed(job.seed + index)  # encoders of sounds draw from the global generator
            with torch.no_grad():
                first = pipeline(**arguments(pipeline, job, index)).audios[0]
            samples = torch.as_tensor(first).float().cpu()
            made.append(PlainSound(samples.reshape(-1, samples.shape[-1]).clamp(-1, 1).numpy()))
        return made

    def results(self, job: Job) -> list[PlainResult]:
        """Return all images or videos of a job, each made by a call of its own."""
        pipeline = pipeline_of(self._loaded, job.task)
        pipeline.set_progress_bar_config(disable=True)
        own = self._own_scheduler
        scheduler_class = type(own) if job.scheduler is None else getattr(diffusers, job.scheduler)
        second = {} if job.guidance_scale_2 is None else {"guider_2": job.guidance_scale_2}
        for name in ("guider", "guider_2", "audio_guider"):
            if getattr(pipeline, name, None) is not None:
                guidance = second.get(name, job.guidance_scale)
                setattr(pipeline, name, getattr(pipeline, name).new(guidance_scale=guidance))
        results: list[PlainResult] = []
        for index in range(job.n):
            if own is not None:
                pipeline.scheduler = scheduler_class.from_config(own.config)
            call = arguments(pipeline, job, index)
            torch.manual_seed(job.seed + index)  # for pipelines that draw from the global generator
            with torch.no_grad(), _captured() as values:
                result = pipeline(**call)
            results += _results(job, result, values)
        return results

    def noise_of_batches(self, jobs: Sequence[Job]) -> float:
        """Return the largest difference between a call for all `jobs`, alike but for prompt and seed, and one each."""
        pipeline = pipeline_of(self._loaded, jobs[0].task)
        pipeline.set_progress_bar_config(disable=True)

        def values(calls: Sequence[dict[str, Any]]) -> np.ndarray:
            listed = {name: [call[name] for call in calls] for name in ("prompt", "generator")}
            if "negative_prompt" in calls[0]:
                listed["negative_prompt"] = [call["negative_prompt"] for call in calls]
            with torch.no_grad():
                result = pipeline(**{**calls[0], **listed, "output_type": "np"})
            return np.asarray(result.frames if jobs[0].task.makes_video else result.images)

        together = values([arguments(pipeline, job, 0) for job in jobs])
        singles = np.concatenate([values([arguments(pipeline, job, 0)]) for job in jobs])
        return float(np.abs(together - singles).max())

    def amplification(self, job: Job, expected: Sequence[PlainResult | PlainSound]) -> float:
        """Return how far a change of each module's output by `NUDGE` of its largest value moves the results."""
        effects = [0.0]
        for seed in range(3):
            with _nudged(self._loaded.components, seed):
                moved: Sequence[PlainResult | PlainSound]
                moved = self.sounds(job) if job.task.makes_audio else self.results(job)
            pairs = zip(moved, expected, strict=True)
            effects += [float(np.abs(one.values - other.values).max()) for one, other in pairs]
        return max(effects)


def _load(source: Path, dtype: torch.dtype) -> Any:
    if (source / "model_index.json").exists():
        return DiffusionPipeline.from_pretrained(source, local_files_only=True, dtype=dtype)
    pipeline = diffusers.ModularPipeline.from_pretrained(str(source), local_files_only=True)
    blocks = pipeline.blocks
    if "prompt_upsampler" in blocks.sub_blocks:  # as its documentation says for a pipeline without one
        blocks.sub_blocks.pop("prompt_upsampler")
        pipeline = blocks.init_pipeline(str(source))
    pipeline.load_components(dtype=dtype, local_files_only=True)
    return pipeline


@contextmanager
def _nudged(components: Mapping[str, Any], seed: int) -> Iterator[None]:
    """Change each output of the text encoders and denoisers at random by `NUDGE` of its largest value."""
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) * 2 - 1
        return tensor + NUDGE * tensor.abs().max() * noise

    modules = [module for module in components.values() if isinstance(module, torch.nn.Module)]
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: map_tensors(output, change)) for module in modules
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _captured() -> Iterator[list[np.ndarray]]:
    """Collect the values, [height, width, channels] each, that diffusers rounds to PIL images."""
    captured: list[np.ndarray] = []

    def patched(original: Any) -> Any:
        def keep(images: np.ndarray) -> Any:
            captured.extend(images if images.ndim == 4 else images[None])
            return original(images)

        return staticmethod(keep)

    with pytest.MonkeyPatch.context() as patch:
        for owner in (VaeImageProcessor, DiffusionPipeline):
            patch.setattr(owner, "numpy_to_pil", patched(owner.numpy_to_pil))
        yield captured


def _results(job: Job, result: Any, captured: Sequence[np.ndarray]) -> list[PlainResult]:
    names = ("frames", "videos", "video", "images", "image")
    made = next(value for name in names if (value := getattr(result, name, None)) is not None)
    one = made[0] if isinstance(made[0], Sequence) else made
    if not job.task.makes_video:  # layers of one image, or one image
        return [_image(image, captured[at : at + 1]) for at, image in enumerate(one)]
    video = _video(one[: job.frames], captured[: job.frames])
    audio = getattr(result, "audio", None)
    if audio is None:
        return [video]
    samples = audio[0].detach().float().cpu()
    return [PlainResult(video.values, video.rounded, samples.reshape(-1, samples.shape[-1]).clamp(-1, 1).numpy())]


def _image(image: Any, captured: Sequence[np.ndarray]) -> PlainResult:
    video = _video([image], captured)
    return PlainResult(video.values[0], video.rounded)


def _video(frames: Sequence[Any], captured: Sequence[np.ndarray]) -> PlainResult:
    levels = np.stack([np.asarray(frame) for frame in frames])
    values = np.stack(captured) if len(captured) == len(levels) else None
    if values is None or values.shape != levels.shape or not np.array_equal((values * 255).round(), levels):
        return PlainResult(levels / np.float32(255), rounded=True)
    return PlainResult(values, _is_rounded(values))


def _is_rounded(values: np.ndarray) -> bool:
    return bool(np.abs(values * 255 - (values * 255).round()).max() < 1e-4)
