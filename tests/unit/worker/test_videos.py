"""From frames and sound to an MP4, opened again by a player's library."""

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

from shared.job import Job, OutputFormat, Task
from worker.engine import Audio, Output
from worker.output.videos import crf, encode_video

FRAMES, HEIGHT, WIDTH, FPS = 17, 64, 96, 16


def video_job(**fields: Any) -> Job:
    own: dict[str, Any] = {"frames": FRAMES, "fps": FPS, "output_format": OutputFormat.MP4}
    return a_job("clip", task=Task.TEXT_TO_VIDEO, **(own | fields))


def some_frames(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """Frames that can be told apart: red stays, green rises."""
    frames = np.zeros((FRAMES, height, width, 3), np.uint8)
    frames[..., 0] = 200
    frames[..., 1] = (np.arange(FRAMES) * 12)[:, None, None]
    return frames


def tone(rate: int, channels: int, seconds: float = FRAMES / FPS) -> Audio:
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(rate * seconds)) / rate)
    return Audio(np.repeat(wave[None].astype(np.float32), channels, axis=0), rate)


def boxes(data: bytes) -> Iterator[str]:
    """The names of a file's outermost boxes, in order."""
    at = 0
    while at < len(data):
        yield data[at + 4 : at + 8].decode()
        at += int.from_bytes(data[at : at + 4], "big")


def test_a_player_finds_the_frames_as_they_were_made() -> None:
    """H.264 in yuv420p at the job's rate, every frame in its place with its colours."""
    made = some_frames()
    video = encode_video(Output(made), video_job(), 0)
    with av.open(io.BytesIO(video.data)) as file:
        (stream,) = file.streams
        assert isinstance(stream, av.VideoStream)
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.average_rate, stream.frames) == (FPS, FRAMES)
        seen = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(stream)])
    assert seen.shape == made.shape
    assert np.abs(seen.astype(int) - made).max() <= 4
    assert (video.width, video.height, video.frames, video.fps) == (WIDTH, HEIGHT, FRAMES, FPS)
    assert video.duration_s == pytest.approx(FRAMES / FPS, abs=1e-3)


@pytest.mark.parametrize("sound", [None, tone(24000, 2)])
def test_the_index_comes_before_the_frames(sound: Audio | None) -> None:
    """So that a browser starts to play before it has the whole file; also where a long text is in the index."""
    job = video_job(embed_parameters=True, prompt="🎬" * 5000)
    names = list(boxes(encode_video(Output(some_frames(), audio=sound), job, 0).data))
    assert names.index("moov") < names.index("mdat")


@pytest.mark.parametrize(
    ("rate", "channels", "expected"),
    [(24000, 2, (24000, "stereo")), (16000, 1, (16000, "mono")), (30000, 2, (48000, "stereo"))],
    ids=["as LTX-2", "mono", "a rate that AAC has not"],
)
def test_sound_goes_with_the_frames(rate: int, channels: int, expected: tuple[int, str]) -> None:
    """An AAC track as long as the frames, in which the tone is heard."""
    video = encode_video(Output(some_frames(), audio=tone(rate, channels)), video_job(), 0)
    assert video.has_audio
    with av.open(io.BytesIO(video.data)) as file:
        (track,) = file.streams.audio
        assert track.codec_context.name == "aac"
        assert (track.rate, track.codec_context.layout.name) == expected
        heard = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(track)])
    assert len(heard) / track.rate == pytest.approx(FRAMES / FPS, abs=0.1)
    middle = heard[len(heard) // 4 : -len(heard) // 4]
    loudest = np.fft.rfftfreq(len(middle), 1 / track.rate)[np.abs(np.fft.rfft(middle)).argmax()]
    assert loudest == pytest.approx(440, abs=5)


def test_odd_sides_lose_their_last_row_and_column() -> None:
    """The format halves the colours' resolution; the artifact tells the size that the file has."""
    video = encode_video(Output(some_frames(65, 97)), video_job(), 0)
    with av.open(io.BytesIO(video.data)) as file:
        frame = next(file.decode(video=0))
    assert (frame.width, frame.height) == (video.width, video.height) == (96, 64)


def test_the_thumbnail_is_the_first_frame() -> None:
    """A JPEG, no larger than it is shown."""
    video = encode_video(Output(some_frames(640, 1280)), video_job(), 0)
    with Image.open(io.BytesIO(video.thumbnail)) as still:
        assert (still.format, still.size) == ("JPEG", video.thumbnail_size) == ("JPEG", (512, 256))
        red, green, blue = still.convert("RGB").getpixel((5, 5))  # type: ignore[misc]
    assert abs(red - 200) < 5
    assert max(green, blue) < 5


def test_parameters_are_in_the_file_when_they_were_asked_for_and_else_nothing_of_the_job_is() -> None:
    """As for pictures."""
    told = encode_video(Output(some_frames()), video_job(embed_parameters=True, prompt="a red cat"), 0)
    with av.open(io.BytesIO(told.data)) as file:
        assert '"prompt": "a red cat"' in file.metadata["comment"]
        assert f'"fps": {FPS}' in file.metadata["comment"]
    silent = encode_video(Output(some_frames()), video_job(prompt="secret-words"), 0)
    assert b"secret-words" not in silent.data


def test_quality_is_size() -> None:
    """A rate factor falls as quality rises, within what x264 takes."""
    assert [crf(quality) for quality in (1, 50, 90, 100)] == [51, 32, 18, 14]
    noise = np.random.default_rng(0).integers(0, 255, (8, 64, 64, 3), dtype=np.uint8)
    small, large = (len(encode_video(Output(noise), video_job(output_quality=q), 0).data) for q in (20, 95))
    assert small < large / 2


def test_frames_are_not_held_a_second_time() -> None:
    """Beside the frames that it is given, the encoder's Python side holds one of them and the file."""
    frames = np.broadcast_to(some_frames(512, 512)[:1], (64, 512, 512, 3))
    tracemalloc.start()
    video = encode_video(Output(frames), video_job(), 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one = 512 * 512 * 3
    assert peak < 8 * one + 2 * len(video.data), f"{peak / one:.0f} frames"
