"""From a video's frames and sound to an MP4 that players start at once, and to a still that stands for it.

H.264 in yuv420p plays everywhere. The index (`moov`) comes before the frames: room is left for it, as the file is made
in memory and written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from av.video.stream import VideoStream
from PIL import Image

from shared.job import Job
from worker.engine import Audio, Output
from worker.output.images import parameters_of

THREADS = 2  # of one encoder: the GPU's host has other work
PRESET = "fast"
THUMBNAIL_SIDE = 512
_AAC_RATES = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000)
_AAC_BITS = 128_000
_AAC_FRAME = 1024  # samples a packet
# The index has at most 40 bytes a packet (size, place, order, key frame), and some 2 kB of heads.
_INDEX_BYTES_A_PACKET = 64
_INDEX_HEAD_BYTES = 8192

Frame = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Video:
    """A video's file and its thumbnail, a JPEG; sides in pixels, both even."""

    data: bytes
    thumbnail: bytes
    thumbnail_size: tuple[int, int]
    width: int
    height: int
    frames: int
    fps: int
    has_audio: bool

    @property
    def duration_s(self) -> float:
        return round(self.frames / self.fps, 3)


def encode_video(made: Output, job: Job, index: int) -> Video:
    """Return video `index` of `job`; it holds the job's parameters exactly when `job.embed_parameters` is set.

    A last odd row or column is cut off, as the format halves the colours' resolution. Each frame is converted as it
    is encoded, so that beside the frames there are only their packets.
    """
    frames, fps = made.pixels, job.fps or 1
    count, height, width = len(frames), made.pixels.shape[1] // 2 * 2, made.pixels.shape[2] // 2 * 2
    file = BytesIO()
    with av.open(file, "w", format="mp4", options={"moov_size": str(_index_bytes(made, job, index))}) as container:
        if job.embed_parameters:
            container.metadata["comment"] = parameters_of(job, index)
        stream = _video_stream(container, fps, (width, height), job.output_quality)
        audio = None if made.sound is None else _Audio(container, made.sound)
        for at in range(count):
            container.mux(stream.encode(_frame(frames[at, :height, :width], at)))
            if audio is not None:  # in step, so that the muxer has nothing to hold
                audio.encode_until((at + 1) / fps)
        container.mux(stream.encode())
        if audio is not None:
            audio.finish()
    thumbnail, size = _thumbnail(frames[0, :height, :width])
    return Video(file.getvalue(), thumbnail, size, width, height, count, fps, audio is not None)


def _index_bytes(made: Output, job: Job, index: int) -> int:
    packets = len(made.pixels)
    if made.sound is not None:
        seconds = made.sound.samples.shape[-1] / made.sound.rate
        packets += round(seconds * max(_AAC_RATES)) // _AAC_FRAME + 8
    words = len(parameters_of(job, index).encode()) if job.embed_parameters else 0
    return _INDEX_HEAD_BYTES + _INDEX_BYTES_A_PACKET * packets + words


def _video_stream(container: OutputContainer, fps: int, size: tuple[int, int], quality: int) -> VideoStream:
    stream = container.add_stream("libx264", rate=fps, options={"crf": str(crf(quality)), "preset": PRESET})
    stream.width, stream.height = size
    stream.pix_fmt = "yuv420p"
    context = stream.codec_context
    context.thread_count = THREADS
    context.time_base = Fraction(1, fps)
    context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
    context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
    return stream


def crf(quality: int) -> int:
    """Return x264's rate factor for a quality of 1 to 100: 14 at best, where 18 at 90 passes for lossless."""
    return round(51 - 0.37 * quality)


def _frame(pixels: Frame, at: int) -> av.VideoFrame:
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
    frame = frame.reformat(
        format="yuv420p",
        src_color_range=ColorRange.JPEG,
        dst_color_range=ColorRange.MPEG,
        dst_colorspace=Colorspace.ITU709,
    )
    frame.pts = at
    return frame


def _thumbnail(frame: Frame) -> tuple[bytes, tuple[int, int]]:
    still = Image.fromarray(np.ascontiguousarray(frame))
    still.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file = BytesIO()
    still.save(file, "JPEG", quality=85)
    return file.getvalue(), still.size


class _Audio:
    """The sound track of one file, encoded up to where its frames are."""

    def __init__(self, container: OutputContainer, sound: Audio) -> None:
        self._container = container
        self._samples = sound.samples[:2]  # mono or stereo
        self._rate = sound.rate
        self._done = 0
        rate = sound.rate if sound.rate in _AAC_RATES else 48000
        self._layout = "mono" if len(self._samples) == 1 else "stereo"
        self._stream: AudioStream = container.add_stream("aac", rate=rate)
        self._stream.codec_context.layout = self._layout
        self._stream.codec_context.bit_rate = _AAC_BITS
        self._resampler = AudioResampler(format="fltp", layout=self._layout, rate=rate, frame_size=_AAC_FRAME)

    def encode_until(self, seconds: float) -> None:
        end = min(self._samples.shape[-1], round(seconds * self._rate))
        if end > self._done:
            self._encode(self._samples[:, self._done : end])
            self._done = end

    def finish(self) -> None:
        """Encode the rest, also what is longer than the frames."""
        self.encode_until(self._samples.shape[-1] / self._rate)
        self._mux(self._resampler.resample(None))
        self._container.mux(self._stream.encode(None))

    def _encode(self, samples: npt.NDArray[np.float32]) -> None:
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=self._layout)
        frame.sample_rate = self._rate
        frame.pts = self._done
        frame.time_base = Fraction(1, self._rate)
        self._mux(self._resampler.resample(frame))

    def _mux(self, frames: list[Any]) -> None:
        for frame in frames:
            self._container.mux(self._stream.encode(frame))
