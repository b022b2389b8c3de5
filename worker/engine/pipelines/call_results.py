"""From the output of a pipeline's call to pixels, audio, a mesh or latents."""

from typing import Any

import numpy as np
import torch
from PIL import Image

from shared.errors import InferenceFailed, JobError, NonFiniteLatents
from shared.tasks import OutputFormat
from worker.engine.channel import shared_array
from worker.engine.outputs import Audio, Latents, Mesh, Output, Pixels
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.inpainting import Paste
from worker.engine.pipelines.sounds import audio_of, to_audio

LATENT = OutputFormat.LATENT.value  # diffusers' `output_type` has the same name
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def make_results(
    pipeline: Pipeline, arguments: dict[str, Any], paste: Paste | None = None
) -> list[Output] | list[Audio] | list[Mesh] | list[Latents]:
    """Call the pipeline and copy its output to the host: one image, the layers of one, a video, a sound or a mesh; or
    latents.

    A flagged image is not pasted: the safety checker has made it black.
    """
    result = pipeline(**arguments)
    if isinstance(result, Mesh):
        return [result]
    if arguments.get("output_type") == LATENT:
        return [_to_latents(result.images)]
    if (sound := audio_of(pipeline, result)) is not None:
        return [sound]
    images = images_of(pipeline, arguments, result)
    if isinstance(images, torch.Tensor):
        return [Output(to_frames(images), audio=_audio(pipeline, result))]
    pixels, flagged = [to_pixels(image) for image in images], is_flagged(result)
    if paste is not None and not flagged:
        pixels = [paste(image) for image in pixels]
    return [Output(image, flagged) for image in pixels]


def _to_latents(tensor: torch.Tensor) -> Latents:
    if not bool(tensor.isfinite().all()):
        raise non_finite_error()
    values = tensor.detach().cpu().contiguous()
    return Latents(_DTYPES[values.dtype], tuple(values.shape), values.view(torch.uint8).numpy().tobytes())


def images_of(pipeline: Pipeline, arguments: dict[str, Any], result: Any) -> torch.Tensor | list[torch.Tensor]:
    """Return the images of a pipeline's output as tensors [channels, height, width], or its video as one tensor
    [frames, channels, height, width].

    The output holds tensors, arrays or PIL images. The values are 0 to 1 if the pipeline keeps to that.
    """
    frames = getattr(result, "frames", getattr(result, "video", None))
    if frames is not None:
        is_one = getattr(frames, "ndim", 5) == 4 or isinstance(frames[0], Image.Image)  # Cosmos 3, not a list of one
        video = frames if is_one else _only(pipeline, frames)
        sent = arguments.get("video")
        # Helios makes whole chunks of 33; CogVideoX decodes an even number of latents to 3 frames more than it got.
        return _stack(pipeline, video)[: arguments.get("num_frames", None if sent is None else len(sent))]
    only = _only(pipeline, getattr(result, "images", getattr(result, "image", None)))
    if isinstance(only, list) or getattr(only, "ndim", 3) == 4:
        return list(_stack(pipeline, only))  # layers
    return [_to_tensor(pipeline, only)]


def is_flagged(result: Any) -> bool:
    """Return whether the safety checker of a pipeline found anything in its only image."""
    names = ("nsfw_content_detected", "nsfw_detected", "watermark_detected")
    return any(flags and flags[0] for flags in (getattr(result, name, None) for name in names))


def _only(pipeline: Pipeline, batch: Any) -> Any:
    if not isinstance(batch, torch.Tensor | np.ndarray | list) or len(batch) != 1:
        raise InferenceFailed(f"{type(pipeline).__name__} did not return exactly one result")
    return batch[0]


def _stack(pipeline: Pipeline, images: Any) -> torch.Tensor:
    if isinstance(images, torch.Tensor | np.ndarray) and images.ndim == 4:
        return images if isinstance(images, torch.Tensor) else torch.from_numpy(images).permute(0, 3, 1, 2)
    return torch.stack([_to_tensor(pipeline, image) for image in images])


def _to_tensor(pipeline: Pipeline, image: Any) -> torch.Tensor:
    if isinstance(image, Image.Image):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    if not isinstance(image, torch.Tensor | np.ndarray) or image.ndim != 3:
        raise InferenceFailed(f"{type(pipeline).__name__} returned no image")
    return image if isinstance(image, torch.Tensor) else torch.from_numpy(image).permute(2, 0, 1)


def _audio(pipeline: Pipeline, result: Any) -> Audio | None:
    audio = getattr(result, "audio", None)
    if audio is None:
        return None
    return to_audio(audio[0], int(_sampling_rate(pipeline, result)))


def _sampling_rate(pipeline: Pipeline, result: Any) -> float:
    """Return the sound's samples per second, which the output says, or the pipeline, or its vocoder."""
    for holder, name in ((result, "sampling_rate"), (pipeline, "audio_sample_rate")):
        rate: float | None = getattr(holder, name, None)
        if rate is not None:
            return rate
    return float(pipeline.vocoder.config.output_sampling_rate)


def to_pixels(image: torch.Tensor) -> Pixels:
    """Return [channels, height, width] values of 0 to 1 as uint8 [height, width, channels], in one transfer.

    Values outside become black or white.
    """
    has_nan = image.amax().isnan()  # NaN counts as the largest; isnan().any() takes ten times as long
    levels = (image.detach().float() * 255).round().clamp_(0, 255).to(torch.uint8)
    pixels: Pixels = torch.stack(levels.unbind(), dim=-1).cpu().numpy()  # a third of the time of permute().contiguous()
    if bool(has_nan):
        raise NonFiniteLatents("the decoder returned values that are not numbers")
    return pixels


def to_frames(video: torch.Tensor) -> Pixels:
    """Return [frames, 3, height, width] values of 0 to 1 as uint8 [frames, height, width, 3].

    Frame by frame, into memory that the encoder's process shares, so that a video is in memory once.
    """
    first = to_pixels(video[0])
    pixels: Pixels = shared_array((len(video), *first.shape), first.dtype)
    pixels[0] = first
    for at in range(1, len(video)):
        pixels[at] = to_pixels(video[at])
    return pixels


def non_finite_error() -> JobError:
    return NonFiniteLatents("denoising produced values that are not finite; try another seed, size or guidance")
