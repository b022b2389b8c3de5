"""Input videos of tests: MP4 and MOV files with frames that can be told apart."""

from __future__ import annotations

import io
import struct
from fractions import Fraction
from functools import lru_cache

import av
import numpy as np
from PIL import Image

SIZE = (96, 80)  # another one than the jobs'
_CLOCK = 90_000


@lru_cache(64)  # the encoder makes another file of the same frames about every tenth time
def a_video_file(  # noqa: PLR0913
    frames: int = 9,
    fps: int = 8,
    *,
    shade: int = 0,
    size: tuple[int, int] = SIZE,
    sound: bool = False,
    times_s: tuple[float, ...] = (),
    pixels: str = "yuv420p",
    container: str = "mp4",
    metadata: str = "",
) -> bytes:
    """Return a video of a gradient that grows brighter from frame to frame; `times_s` are those of its frames."""
    file = io.BytesIO()
    images = [_frame(shade + 20 * at, size) for at in range(frames)]
    with av.open(file, "w", format=container) as output:
        if metadata:
            output.metadata["comment"] = metadata
        stream = output.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        stream.codec_context.time_base = Fraction(1, _CLOCK)
        audio = output.add_stream("aac", rate=8000) if sound else None
        for at, image in enumerate(images):
            frame = av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")
            frame.pts = round(_CLOCK * (times_s[at] if times_s else at / fps))
            frame.time_base = Fraction(1, _CLOCK)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
        if audio is not None:
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            silence.sample_rate = 8000
            output.mux(audio.encode(silence))
            output.mux(audio.encode())
    return file.getvalue()


def turned(video: bytes) -> bytes:
    """Return a video that players turn by a quarter to the right, as phones record it."""
    at = video.index(b"tkhd") + 4 + 40
    quarter = b"".join(number.to_bytes(4, "big", signed=True) for number in (0, 65536, 0, -65536, 0))
    return video[:at] + quarter + video[at + len(quarter) :]


def hidden(video: bytes, frames: int, fps: int = 8) -> bytes:
    """Return a video whose edit list hides its first frames."""
    at, scale_at = video.index(b"elst") + 4, video.index(b"mdhd") + 4 + 12
    (length, _), (scale,) = struct.unpack_from(">Ii", video, at + 8), struct.unpack_from(">I", video, scale_at)
    (movie_scale,) = struct.unpack_from(">I", video, video.index(b"mvhd") + 4 + 12)
    edit = struct.pack(">Ii", length - frames * movie_scale // fps, frames * scale // fps)
    return video[: at + 8] + edit + video[at + 16 :]


def a_plain_video(colour: str, frames: int = 3, size: tuple[int, int] = (64, 64)) -> bytes:
    """Return a video of one colour."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for _ in range(frames):
            pixels = np.asarray(Image.new("RGB", size, colour))
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode())
    return file.getvalue()


def _frame(shade: int, size: tuple[int, int]) -> Image.Image:
    return Image.radial_gradient("L").resize(size).point(lambda value: (value // 3 + shade) % 256).convert("RGB")
