"""Input audio: decoding a job's file to samples, and bringing these to the rate and length that its pipeline gets."""

import io
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import UnusableInput
from shared.inputs.formats.audio import audio_format
from worker.engine.protocol import Audio

Samples = npt.NDArray[np.float32]
MOST_CHANNELS = 2
HIGHEST_RATE = 48_000
"""Of the models' sounds; one at 192 kHz would take four times the memory."""

_LAYOUTS = {1: "mono", 2: "stereo"}


def decode_audio(data: bytes, most_s: float, param: str = "audio") -> Audio:
    """Return the first `most_s` seconds of a sound, mono or stereo, at 48 kHz at most.

    Raises `UnusableInput` if it cannot be decoded.
    """
    import av  # not before there is a sound: the libraries of FFmpeg take 5 MB
    from av.audio.resampler import AudioResampler

    try:
        with av.open(io.BytesIO(data), "r", format=audio_format(data) or "wav") as container:
            stream = container.streams.audio[0]
            rate, channels = min(stream.rate, HIGHEST_RATE), min(stream.channels, MOST_CHANNELS)
            resampler = AudioResampler(format="fltp", layout=_LAYOUTS[channels], rate=rate)
            parts = _resampled_parts(resampler, container.decode(stream))
            usable = (np.nan_to_num(part).clip(-1, 1) for part in parts)
            samples = _collected(usable, channels, round(most_s * rate))
    except Exception as error:  # FFmpeg's readers raise many types
        raise UnusableInput(f"the input audio cannot be decoded: {error}", param=param) from error
    if not samples.size:
        raise UnusableInput("the input audio has no samples", param=param)
    return Audio(samples, rate)


def _resampled_parts(resampler: Any, frames: Iterable[Any]) -> Iterator[Samples]:
    for frame in frames:
        yield from (part.to_ndarray() for part in resampler.resample(frame))
    yield from (part.to_ndarray() for part in resampler.resample(None))


def _collected(parts: Iterable[Samples], channels: int, most: int) -> Samples:
    """Return the first `most` samples of parts, held once: a file of 51 KB can have 240 seconds at 192 kHz."""
    samples, held = np.empty((channels, most), np.float32), 0  # pages that are not written take no memory
    for part in parts:
        taken = part[:, : most - held]
        samples[:, held : held + taken.shape[-1]] = taken
        held += taken.shape[-1]
        if held == most:
            break
    return samples[:, :held]


def at_rate(sound: Audio, rate: int, channels: int, seconds: float) -> Samples:
    """Return the samples of a sound at another rate, in one or two channels, cut or filled with silence."""
    samples = resampled(sound, rate).samples
    # FFmpeg would make one channel quieter when it becomes two.
    if channels == 1 and len(samples) > 1:
        samples = samples.mean(axis=0, keepdims=True)
    elif channels > 1 and len(samples) == 1:
        samples = np.repeat(samples, MOST_CHANNELS, axis=0)
    wanted = round(seconds * rate)
    filled = np.zeros((len(samples), wanted), np.float32)
    kept = min(wanted, samples.shape[-1])
    filled[:, :kept] = samples[:, :kept]
    return filled


def resampled(sound: Audio, rate: int) -> Audio:
    """Return a sound at another rate."""
    from av.audio.resampler import AudioResampler

    if sound.rate == rate:
        return sound
    channels, count = sound.samples.shape
    resampler = AudioResampler(format="fltp", layout=_LAYOUTS[channels], rate=rate)
    most = math.ceil(count * rate / sound.rate)
    return Audio(_collected(_resampled_parts(resampler, _frames(sound)), channels, most), rate)


def _frames(sound: Audio) -> Iterator[Any]:
    """Yield the frames of a sound, of a second each."""
    import av

    channels, count = sound.samples.shape
    for at in range(0, count, sound.rate):
        second = np.ascontiguousarray(sound.samples[:, at : at + sound.rate])
        frame = av.AudioFrame.from_ndarray(second, format="fltp", layout=_LAYOUTS[channels])
        frame.sample_rate, frame.pts, frame.time_base = sound.rate, at, Fraction(1, sound.rate)
        yield frame
