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
from shared.job_record import FieldWarning
from worker.engine.outputs import Audio

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

    try:
        with av.open(io.BytesIO(data), "r", format=audio_format(data) or "wav") as container:
            sound = _decoded(container, most_s)
    except Exception as error:  # FFmpeg's readers raise many types
        raise UnusableInput(f"the input audio cannot be decoded: {error}", param=param) from error
    if not sound.samples.size:
        raise UnusableInput("the input audio has no samples", param=param)
    return sound


def decode_soundtrack(data: bytes, most_s: float) -> tuple[Audio | None, tuple[FieldWarning, ...]]:
    """Return the sound of a video to the first `most_s` seconds of its frames, None if it has none; and a warning about
    one that cannot be decoded."""
    import av

    try:
        with av.open(io.BytesIO(data), "r", format="mov", options={"enable_drefs": "0"}) as container:
            if not container.streams.audio:
                return None, ()
            sound = _decoded(container, most_s, since_s=_start_s(container.streams.video[0]))
    except Exception as error:  # FFmpeg's readers raise many types
        message = f"video: its sound cannot be decoded, and the result has none of it: {error}"[:300]
        return None, (FieldWarning(param="video", message=message),)
    return (sound if sound.samples.size else None), ()


def _decoded(container: Any, most_s: float, *, since_s: float | None = None) -> Audio:
    """Return the sound of a container from its beginning, or from the time `since_s` of its other streams."""
    from av.audio.resampler import AudioResampler

    stream = container.streams.audio[0]
    rate, channels = min(stream.rate, HIGHEST_RATE), min(stream.channels, MOST_CHANNELS)
    resampler = AudioResampler(format="fltp", layout=_LAYOUTS[channels], rate=rate)
    parts = _resampled_parts(resampler, container.decode(stream))
    usable = (np.nan_to_num(part).clip(-1, 1) for part in parts)
    late_s = 0.0 if since_s is None else max(-most_s, min(most_s, _start_s(stream) - since_s))
    shifted = _shifted(usable, channels, round(late_s * rate))
    return Audio(_collected(shifted, channels, round(most_s * rate)), rate)


def _start_s(stream: Any) -> float:
    return 0.0 if stream.start_time is None else float(stream.start_time * stream.time_base)


def _shifted(parts: Iterable[Samples], channels: int, late: int) -> Iterator[Samples]:
    """Yield silence of `late` samples before the parts; if that is negative, the parts without so many."""
    if late > 0:
        yield np.zeros((channels, late), np.float32)
    early = max(0, -late)
    for part in parts:
        dropped = min(early, part.shape[-1])
        early -= dropped
        yield part[:, dropped:]


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
