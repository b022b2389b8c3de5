"""Input audio: decoding a job's file to samples, and bringing these to the rate and length that its pipeline gets."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import UnusableInput
from shared.inputs.formats.audio import audio_format
from worker.engine.protocol import Audio

Samples = npt.NDArray[np.float32]
MOST_CHANNELS = 2


def decode_audio(data: bytes, most_s: float, param: str = "audio") -> Audio:
    """Return the first `most_s` seconds of a sound, mono or stereo; raises `UnusableInput` if it cannot be decoded."""
    import av  # not before there is a sound: the libraries of FFmpeg take 5 MB
    from av.audio.resampler import AudioResampler

    parts: list[Any] = []
    try:
        with av.open(io.BytesIO(data), "r", format=audio_format(data) or "wav") as container:
            stream = container.streams.audio[0]
            rate, layout = stream.rate, "mono" if stream.channels == 1 else "stereo"
            resampler = AudioResampler(format="fltp", layout=layout, rate=rate)
            most, held = round(most_s * rate), 0
            for frame in container.decode(stream):
                held += frame.samples
                parts += [part.to_ndarray() for part in resampler.resample(frame)]
                if held >= most:
                    break
            parts += [part.to_ndarray() for part in resampler.resample(None)]
    except Exception as error:  # FFmpeg's readers raise many types
        raise UnusableInput(f"the input audio cannot be decoded: {error}", param=param) from error
    if not parts:
        raise UnusableInput("the input audio has no samples", param=param)
    samples = np.nan_to_num(np.concatenate(parts, axis=-1)[:, :most]).clip(-1, 1)
    return Audio(samples.astype(np.float32), rate)


def at_rate(sound: Audio, rate: int, channels: int, seconds: float) -> Samples:
    """Return the samples of a sound at another rate, in one or two channels, cut or filled with silence."""
    samples = sound.samples if sound.rate == rate else _resampled(sound, rate)
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


def _resampled(sound: Audio, rate: int) -> Samples:
    import av
    from av.audio.resampler import AudioResampler

    layout = "mono" if len(sound.samples) == 1 else "stereo"
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound.samples), format="fltp", layout=layout)
    frame.sample_rate = sound.rate
    resampler = AudioResampler(format="fltp", layout=layout, rate=rate)
    made = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([part.to_ndarray() for part in made], axis=-1).astype(np.float32)
