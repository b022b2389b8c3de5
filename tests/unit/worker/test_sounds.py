"""Sound files: their format, length and parameters, and their waveforms."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from shared.job import Job
from shared.tasks import AUDIO_TYPES, OutputFormat, Task
from worker.engine.outputs import Audio
from worker.output.audio_encoding import bitrate, encode_audio, waveform

RATE = 44_100


def a_tone(seconds: float = 1.0, channels: int = 2, rate: int = RATE) -> Audio:
    tone = 0.5 * np.sin(np.arange(int(seconds * rate)) * 2 * np.pi * 440 / rate)
    return Audio(np.repeat(tone[None].astype(np.float32), channels, axis=0), rate)


@pytest.fixture
def sound_job(make_job: Callable[..., Job]) -> Callable[..., Job]:
    def build(form: str, **fields: Any) -> Job:
        return make_job(task=Task.TEXT_TO_AUDIO, width=0, height=0, duration_s=1.0, output_format=form, **fields)

    return build


def read(data: bytes) -> tuple[Any, np.ndarray, dict[str, str]]:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler("fltp", stream.layout, stream.rate)
        parts = [part.to_ndarray() for frame in container.decode(stream) for part in resampler.resample(frame)]
        return stream, np.concatenate(parts, axis=-1), {**container.metadata, **stream.metadata}


@pytest.mark.parametrize("form", [form.value for form in AUDIO_TYPES])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_file_has_the_samples_and_the_parameters(form: str, channels: int, sound_job: Callable[..., Job]) -> None:
    sound = a_tone(channels=channels)
    made = encode_audio(sound, sound_job(form, embed_parameters=True, prompt="a hum"), 0)
    stream, samples, metadata = read(made.data)
    assert (made.duration_s, made.channels) == (1.0, channels)
    assert made.sample_rate == stream.rate == (48_000 if form == "opus" else RATE)
    assert samples.shape[0] == channels
    assert samples.shape[-1] == pytest.approx(made.sample_rate, rel=0.1)
    assert 0.45 < np.abs(samples[:, 5000:-5000]).max() < 0.55
    found = json.loads(next(text for name, text in metadata.items() if name.lower() in ("comment", "description")))
    assert (found["prompt"], found["duration_s"], "width" in found) == ("a hum", 1.0, False)


@pytest.mark.parametrize("form", ["wav", "flac"])
def test_lossless_files_differ_by_rounding_only(form: str, sound_job: Callable[..., Job]) -> None:
    sound = a_tone()
    _, samples, metadata = read(encode_audio(sound, sound_job(form), 0).data)
    assert np.abs(samples - sound.samples).max() < 1e-4
    assert not any("prompt" in text for text in metadata.values())


@pytest.mark.parametrize("form", [OutputFormat.MP3, OutputFormat.OPUS])
def test_a_higher_quality_has_more_bits(form: OutputFormat) -> None:
    rates = [bitrate(form, quality, 2) for quality in range(1, 101)]
    assert rates == sorted(rates)
    assert rates[0] < rates[49] < rates[99]
    assert bitrate(form, 90, 1) == bitrate(form, 90, 2) // 2


def test_a_waveform_is_high_where_the_sound_is_loud() -> None:
    samples = a_tone().samples.copy()
    samples[:, : RATE // 2] = 0
    alpha = np.asarray(Image.open(io.BytesIO(waveform(samples))).getchannel("A")) > 0
    assert alpha[:, :250].sum(axis=0).max() <= 2
    assert alpha[:, 262:].sum(axis=0).min() > alpha.shape[0] // 3
