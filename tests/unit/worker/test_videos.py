"""MP4 files of frames and audio, read back by a player's library."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import pytest
from harness.engine import a_job
from PIL import Image

from shared.job import Job
from shared.tasks import OutputFormat, Task
from worker.engine.outputs import Audio, Output
from worker.output.video_encoding import crf, encode_video

FRAMES, HEIGHT, WIDTH, FPS = 17, 64, 96, 16


def video_job(**fields: Any) -> Job:
    defaults: dict[str, Any] = {"frames": FRAMES, "fps": FPS, "output_format": OutputFormat.MP4}
    return a_job("clip", task=Task.TEXT_TO_VIDEO, **(defaults | fields))


def some_frames(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Frames that differ: constant red, rising green."""
    frames = np.zeros((FRAMES, height, width, 3), np.uint8)
    frames[..., 0] = 200
    frames[..., 1] = (np.arange(FRAMES) * 12)[:, None, None]
    return frames


def tone(rate: int, channels: int, seconds: float = FRAMES / FPS) -> Audio:
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(rate * seconds)) / rate)
    return Audio(np.repeat(wave[None].astype(np.float32), channels, axis=0), rate)


def boxes(data: bytes) -> Iterator[str]:
    """The names of a file's top-level boxes, in order."""
    offset = 0
    while offset < len(data):
        yield data[offset + 4 : offset + 8].decode()
        offset += int.from_bytes(data[offset : offset + 4], "big")


def test_frames_are_read_back_in_order() -> None:
    """H.264 in yuv420p at the job's frame rate, with the colours of each frame."""
    frames = some_frames()
    video = encode_video(Output(frames), video_job(), 0)
    with av.open(io.BytesIO(video.data)) as file:
        (stream,) = file.streams
        assert isinstance(stream, av.VideoStream)
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.average_rate, stream.frames) == (FPS, FRAMES)
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(stream)])
    assert decoded.shape == frames.shape
    assert np.abs(decoded.astype(int) - frames).max() <= 4
    assert (video.width, video.height, video.frames, video.fps) == (WIDTH, HEIGHT, FRAMES, FPS)
    assert video.duration_s == pytest.approx(FRAMES / FPS, abs=1e-3)


@pytest.mark.parametrize("sound", [None, tone(24000, 2)])
def test_the_index_comes_before_the_frames(sound: Audio | None) -> None:
    """A browser plays before it has the whole file; also with a long text in the index."""
    job = video_job(embed_parameters=True, prompt="🎬" * 5000)
    names = list(boxes(encode_video(Output(some_frames(), audio=sound), job, 0).data))
    assert names.index("moov") < names.index("mdat")


@pytest.mark.parametrize(
    ("rate", "channels", "expected"),
    [(24000, 2, (24000, "stereo")), (16000, 1, (16000, "mono")), (30000, 2, (48000, "stereo"))],
    ids=["LTX-2", "mono", "a rate that AAC lacks"],
)
def test_audio_is_encoded_with_the_frames(rate: int, channels: int, expected: tuple[int, str]) -> None:
    """An AAC track as long as the frames, with the given tone."""
    video = encode_video(Output(some_frames(), audio=tone(rate, channels)), video_job(), 0)
    assert video.has_audio
    with av.open(io.BytesIO(video.data)) as file:
        (track,) = file.streams.audio
        assert track.codec_context.name == "aac"
        assert (track.rate, track.codec_context.layout.name) == expected
        decoded = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(track)])
    assert len(decoded) / track.rate == pytest.approx(FRAMES / FPS, abs=0.1)
    middle = decoded[len(decoded) // 4 : -len(decoded) // 4]
    loudest = np.fft.rfftfreq(len(middle), 1 / track.rate)[np.abs(np.fft.rfft(middle)).argmax()]
    assert loudest == pytest.approx(440, abs=5)


def test_odd_last_row_and_column_are_cut_off() -> None:
    """The artifact has the size of the file."""
    video = encode_video(Output(some_frames(65, 97)), video_job(), 0)
    with av.open(io.BytesIO(video.data)) as file:
        frame = next(file.decode(video=0))
    assert (frame.width, frame.height) == (video.width, video.height) == (96, 64)


def test_thumbnail_is_the_first_frame() -> None:
    video = encode_video(Output(some_frames(640, 1280)), video_job(), 0)
    with Image.open(io.BytesIO(video.thumbnail)) as image:
        assert (image.format, image.size) == ("JPEG", video.thumbnail_size) == ("JPEG", (512, 256))
        red, green, blue = image.convert("RGB").getpixel((5, 5))  # type: ignore[misc]
    assert abs(red - 200) < 5
    assert max(green, blue) < 5


def test_parameters_are_embedded_only_on_request() -> None:
    embedded = encode_video(Output(some_frames()), video_job(embed_parameters=True, prompt="a red cat"), 0)
    with av.open(io.BytesIO(embedded.data)) as file:
        assert '"prompt": "a red cat"' in file.metadata["comment"]
        assert f'"fps": {FPS}' in file.metadata["comment"]
    plain = encode_video(Output(some_frames()), video_job(prompt="secret-words"), 0)
    assert b"secret-words" not in plain.data


def test_higher_quality_makes_larger_files() -> None:
    assert [crf(quality) for quality in (1, 50, 90, 100)] == [51, 32, 18, 14]
    noise = np.random.default_rng(0).integers(0, 255, (8, 64, 64, 3), dtype=np.uint8)
    small, large = (len(encode_video(Output(noise), video_job(output_quality=q), 0).data) for q in (20, 95))
    assert small < large / 2


def test_frames_are_not_copied_all_at_once() -> None:
    """In addition to the frames, the encoder's Python side holds one frame and the file."""
    frames = np.broadcast_to(some_frames(512, 512)[:1], (64, 512, 512, 3))
    tracemalloc.start()
    video = encode_video(Output(frames), video_job(), 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    frame_bytes = 512 * 512 * 3
    assert peak < 8 * frame_bytes + 2 * len(video.data), f"{peak / frame_bytes:.0f} frames"
