"""Sounds: the arguments of the pipelines that make them, and their outputs as samples."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shared.errors import InferenceFailed, NonFiniteLatents
from shared.job import Job
from shared.tasks import Task
from worker.engine.outputs import Audio
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.input_audio import at_rate
from worker.engine.pipelines.input_images import InputImages

DURATIONS = ("audio_duration", "duration", "audio_end_in_s", "audio_length_in_s", "audio_duration_s")
"""Names that pipelines give to the seconds of a sound."""

SOUND_STRENGTHS = ("init_noise_level", "audio_cover_strength")

_STARTS = ("src_audio", "initial_audio_waveforms", "audio")  # the sound to start from
_REPAINTED = ("mask_start_seconds", "repainting_start")
SOUND_INPUTS = (
    *(*DURATIONS, *SOUND_STRENGTHS, *_STARTS, *_REPAINTED),
    *("initial_audio_sampling_rate", "mask_end_seconds", "repainting_end"),
)
"""Inputs that follow from the fields of a job."""

_RATES = ("sampling_rate", "sample_rate")
_CHANNELS = 2  # of models whose configuration says nothing


def does_sound(task: Task, accepted: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether a call of these parameters takes what a task of sounds gives, and needs nothing else."""
    if not task.makes_audio or accepted.keys().isdisjoint(DURATIONS):
        return False
    needs_start, only_repaints = "audio" in accepted, "mask_start_seconds" in accepted  # Stable Audio 3
    if task is Task.TEXT_TO_AUDIO:
        return not needs_start
    if task is Task.AUDIO_INPAINT:
        return not accepted.keys().isdisjoint(_REPAINTED)
    return not only_repaints and not accepted.keys().isdisjoint(_STARTS)


def sound_arguments(pipeline: Pipeline, job: Job, inputs: InputImages) -> dict[str, Any]:
    """Return the length of a job's sound, and the sound that it starts from, under all names of them."""
    if job.task.takes_audio and inputs.audio is None:
        raise InferenceFailed(f"audio: {job.task.value} needs a sound", param="audio")
    if job.duration_s is None:
        return {}
    seconds = _whole_latents(pipeline, job.duration_s)
    values: dict[str, Any] = dict.fromkeys(DURATIONS, seconds)
    if inputs.audio is None:
        return values
    rate = sample_rate(pipeline)
    start = inputs.audio_at(rate) or inputs.audio
    samples = torch.from_numpy(at_rate(start, rate, _channels(pipeline), seconds))
    values |= {"src_audio": samples, "audio": samples[None], "initial_audio_waveforms": samples[None]}
    values |= {"initial_audio_sampling_rate": rate}
    if job.task is Task.AUDIO_INPAINT:
        begin, end = job.repaint_start_s or 0.0, job.repaint_end_s or job.duration_s
        values |= {"mask_start_seconds": begin, "mask_end_seconds": end}
        values |= {"task_type": "repaint", "repainting_start": begin, "repainting_end": end}
    else:
        strength = 1.0 if job.strength is None else job.strength
        values |= {"init_noise_level": strength, "task_type": "cover", "audio_cover_strength": 1.0 - strength}
    return values


def _whole_latents(pipeline: Pipeline, seconds: float) -> float:
    """Return the shortest length from `seconds` on for which ACE-Step's roundings agree.

    It computes the number of latents from seconds and these from the number: of one in 16 numbers another one results,
    such as 56 of 55, and the call fails (diffusers 0.42).
    """
    rate = getattr(pipeline, "latents_per_second", None)
    if rate is None:
        return seconds
    count = math.ceil(seconds * rate)
    while math.ceil(count / rate * rate) != count:
        count += 1
    return float(count / rate)


def cut_to(sound: Audio, seconds: float) -> Audio:
    """Return the first seconds of a sound: models make whole latents."""
    return Audio(sound.samples[:, : round(seconds * sound.rate)], sound.rate)


def check_lyrics(job: Job, accepted: Mapping[str, inspect.Parameter]) -> None:
    """Raise `InferenceFailed` for a job without lyrics if the pipeline needs some: it has no default for them."""
    lyrics = accepted.get("lyrics")
    if lyrics is not None and lyrics.default is None and job.lyrics is None:
        raise InferenceFailed(f"lyrics: model {job.model!r} needs some", param="lyrics")


def audio_of(pipeline: Pipeline, result: Any) -> Audio | None:
    """Return the sound of a pipeline's output, None for one of images or videos."""
    sounds = getattr(result, "audios", None)
    if sounds is None:
        return None
    first = sounds[0]
    rate = getattr(result, "sampling_rate", None)
    samples = torch.from_numpy(first) if isinstance(first, np.ndarray) else first
    return to_audio(samples, sample_rate(pipeline) if rate is None else int(rate))


def to_audio(samples: torch.Tensor, rate: int) -> Audio:
    """Return [channels, samples] or [samples] values on the host, those outside of -1 to 1 clipped."""
    values = samples.detach().float().cpu()
    if not bool(values.isfinite().all()):
        raise NonFiniteLatents("the decoder returned samples that are not finite")
    return Audio(values.reshape(-1, values.shape[-1]).clamp(-1, 1).numpy(), rate)


def sample_rate(pipeline: Pipeline) -> int:
    """Return the samples per second of a pipeline's sounds, as the configuration of its decoder says."""
    found = _of_decoder(pipeline, _RATES)
    if found is None:
        raise ValueError(f"{type(pipeline).__name__} does not say the sample rate of its sounds")
    return found


def _channels(pipeline: Pipeline) -> int:
    return _of_decoder(pipeline, ("audio_channels",)) or _CHANNELS


def _of_decoder(pipeline: Pipeline, names: tuple[str, ...]) -> int | None:
    for part in ("vocoder", "vae"):
        config = getattr(getattr(pipeline, part, None), "config", None)
        for name in names:
            if value := getattr(config, name, None):
                return int(value)
    return None
