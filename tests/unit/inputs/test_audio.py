"""Input audio: what of a file is kept, and which files are refused."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import Any

import av
import numpy as np
import pytest

from shared.errors import InputRejected
from shared.inputs.validation import inspect

RATE = 16_000
SECRET = b"recorded at home"
FORMS = {
    "wav": ("wav", "pcm_s16le", "audio/wav"),
    "flac": ("flac", "flac", "audio/flac"),
    "mp3": ("mp3", "libmp3lame", "audio/mpeg"),
    "opus": ("ogg", "libopus", "audio/ogg"),
}


def a_sound(form: str, seconds: float = 2.0) -> bytes:
    """Return a stereo file of noise with a comment."""
    container_name, codec, _ = FORMS[form]
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, (2, int(seconds * RATE))).astype(np.float32)
    file = io.BytesIO()
    with av.open(file, "w", format=container_name) as container:
        container.metadata["comment"] = SECRET.decode()
        stream: Any = container.add_stream(codec, rate=RATE)
        stream.codec_context.layout = "stereo"
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        frame.sample_rate = RATE
        kind = stream.codec_context.format.name
        resampler = av.AudioResampler(kind, "stereo", RATE, stream.codec_context.frame_size or None)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return file.getvalue()


def decoded(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        return np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=-1)


def read(data: bytes) -> Any:
    return inspect(data, max_bytes=10_000_000, max_pixels=1, param="audio")


@pytest.mark.parametrize("form", FORMS)
def test_a_sound_is_kept_without_its_comment(form: str) -> None:
    data = a_sound(form)
    assert SECRET in data
    found = read(data)
    assert found.content_type == FORMS[form][2]
    assert found.duration_s == pytest.approx(2.0, abs=0.15)  # MP3 has whole frames, and one before the first
    assert (SECRET in found.data) == (form == "opus")  # Ogg files keep their comments
    assert np.array_equal(decoded(found.data), decoded(data))


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_ends_early_is_refused_or_shorter(form: str) -> None:
    data = a_sound(form)
    for size in range(4, 120, 3):
        with suppress(InputRejected):
            assert read(data[:size]).duration_s <= 2.15


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"hello", "unsupported audio; send a WAV, FLAC, MP3, or Ogg"),
        (b"fLaC\x81" + bytes(60), "no stream information"),
        (b"OggS" + bytes(60), "neither Opus nor Vorbis"),
        (b"ID3\4\0\0\0\0\0\0" + bytes(60), "no frames"),
        (a_sound("wav").replace(b"\1\0\2\0", b"\x55\0\2\0", 1), "not plain PCM"),
        (a_sound("wav").replace(b"\1\0\2\0", b"\3\0\2\0", 1), "not plain PCM"),  # floats of 16 bits
        (a_sound("wav").replace(RATE.to_bytes(4, "little"), b"\1\0\0\0", 1), "1 samples a second"),
    ],
)
def test_other_files_are_refused_by_name(data: bytes, words: str) -> None:
    with pytest.raises(InputRejected, match=words) as refused:
        read(data)
    assert refused.value.param == "audio"


def test_a_sound_longer_than_an_hour_is_refused() -> None:
    silence = a_sound("wav", 0.1).replace(RATE.to_bytes(4, "little"), (8000).to_bytes(4, "little"), 1)
    at = silence.index(b"data")
    long = silence[: at + 4] + (8000 * 4 * 3700).to_bytes(4, "little") + bytes(8000 * 4 * 3700)
    with pytest.raises(InputRejected, match="3700 seconds; at most 3600"):
        inspect(long, max_bytes=200_000_000, max_pixels=1, param="audio")
