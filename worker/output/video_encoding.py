"""MP4 files of frames and audio, and their thumbnails.

H.264 in yuv420p plays everywhere. The index (`moov`) is placed before the frames, so that players start at once; its
space is reserved, since the file is written only once, in memory.
"""

from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from av.video.stream import VideoStream
from PIL import Image

from shared.job import Job
from worker.engine.outputs import Audio, Output, Pixels
from worker.output.image_encoding import parameters_json

ENCODER_THREADS = 2  # per video: the GPU's host has other work
PRESET = "fast"
THUMBNAIL_SIDE = 512
_AAC_RATES = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000)
_AAC_BITS = 128_000
_AAC_FRAME = 1024  # samples per packet
# The index has at most 40 bytes per packet (size, offset, order, key frame), and about 2 kB of headers.
_INDEX_BYTES_PER_PACKET = 64
_INDEX_HEADER_BYTES = 8192


@dataclass(frozen=True)
class Video:
    """An MP4 file and its JPEG thumbnail; width and height are even."""

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


def encode_video(output: Output, job: Job, index: int) -> Video:
    """Return video `index` of `job`, with the job's parameters when `job.embed_parameters` is set.

    An odd last row or column is cut off, since yuv420p halves the colour resolution. Frames are converted one at a
    time, so that memory holds only the frames and their packets.
    """
    fps = job.fps or 1
    height, width = output.pixels.shape[1] // 2 * 2, output.pixels.shape[2] // 2 * 2
    frames = output.pixels[:, :height, :width]
    comment = parameters_json(job, index) if job.embed_parameters else ""
    file = BytesIO()
    with av.open(file, "w", format="mp4", options={"moov_size": str(_index_bytes(output, comment))}) as container:
        if comment:
            container.metadata["comment"] = comment
        stream = _video_stream(container, fps, (width, height), job.output_quality)
        audio = None if output.audio is None else _Audio(container, output.audio)
        for number, pixels in enumerate(frames):
            container.mux(stream.encode(_frame(pixels, number)))
            if audio is not None:  # in step with the frames, so that the muxer buffers nothing
                audio.encode_until((number + 1) / fps)
        container.mux(stream.encode())
        if audio is not None:
            audio.finish()
    thumbnail, size = _thumbnail(frames[0])
    return Video(file.getvalue(), thumbnail, size, width, height, len(frames), fps, audio is not None)


def _index_bytes(output: Output, comment: str) -> int:
    packets = len(output.pixels)
    if output.audio is not None:
        seconds = output.audio.samples.shape[-1] / output.audio.rate
        packets += round(seconds * max(_AAC_RATES)) // _AAC_FRAME + 8
    return _INDEX_HEADER_BYTES + _INDEX_BYTES_PER_PACKET * packets + len(comment.encode())


def _video_stream(container: OutputContainer, fps: int, size: tuple[int, int], quality: int) -> VideoStream:
    stream = container.add_stream("libx264", rate=fps, options={"crf": str(crf(quality)), "preset": PRESET})
    stream.width, stream.height = size
    stream.pix_fmt = "yuv420p"
    context = stream.codec_context
    context.thread_count = ENCODER_THREADS
    context.time_base = Fraction(1, fps)
    context.colorspace, context.color_range = Colorspace.ITU709, ColorRange.MPEG
    context.color_primaries, context.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
    return stream


def crf(quality: int) -> int:
    """Return x264's constant rate factor for a quality of 1 to 100: 14 for 100; 18, for 90, is visually lossless."""
    return round(51 - 0.37 * quality)


def _frame(pixels: Pixels, number: int) -> av.VideoFrame:
    rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
    ranges = {"src_color_range": ColorRange.JPEG, "dst_color_range": ColorRange.MPEG}
    frame = rgb.reformat(format="yuv420p", dst_colorspace=Colorspace.ITU709, **ranges)
    frame.pts = number
    return frame


def _thumbnail(frame: Pixels) -> tuple[bytes, tuple[int, int]]:
    image = Image.fromarray(np.ascontiguousarray(frame))
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file = BytesIO()
    image.save(file, "JPEG", quality=85)
    return file.getvalue(), image.size


class _Audio:
    """The AAC track of a file, encoded in step with its frames."""

    def __init__(self, container: OutputContainer, sound: Audio) -> None:
        self._container = container
        self._samples = sound.samples[:2]  # mono or stereo
        self._rate = sound.rate
        self._encoded = 0
        rate = sound.rate if sound.rate in _AAC_RATES else 48000
        self._layout = "mono" if len(self._samples) == 1 else "stereo"
        self._stream: AudioStream = container.add_stream("aac", rate=rate)
        self._stream.codec_context.layout = self._layout
        self._stream.codec_context.bit_rate = _AAC_BITS
        self._resampler = AudioResampler(format="fltp", layout=self._layout, rate=rate, frame_size=_AAC_FRAME)

    def encode_until(self, seconds: float) -> None:
        end = min(self._samples.shape[-1], round(seconds * self._rate))
        if end > self._encoded:
            samples = np.ascontiguousarray(self._samples[:, self._encoded : end])
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=self._layout)
            frame.sample_rate = self._rate
            frame.pts = self._encoded
            frame.time_base = Fraction(1, self._rate)
            self._mux(self._resampler.resample(frame))
            self._encoded = end

    def finish(self) -> None:
        """Encode the remaining samples, also those beyond the last frame."""
        self.encode_until(self._samples.shape[-1] / self._rate)
        self._mux(self._resampler.resample(None))
        self._container.mux(self._stream.encode(None))

    def _mux(self, frames: list[Any]) -> None:
        for frame in frames:
            self._container.mux(self._stream.encode(frame))
