"""Input videos: decoding the frames that a job uses, one at a time, and scaling them to what its pipeline gets."""

import io
import time
from collections.abc import Iterator

import av
from av.container import InputContainer
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace
from av.video.stream import VideoStream
from PIL import Image, ImageOps

from shared.errors import UnusableInput
from shared.inputs.formats.mp4 import CODECS
from shared.inputs.validation import MAX_VIDEO_PIXELS
from shared.inputs.video_timing import frames_at, seconds_per_frame, tolerance_s
from shared.job import InputRef, Job
from shared.job_record import FieldWarning
from shared.tasks import Task

DECODER_THREADS = 2  # per video; each holds frames of its own
LONGEST_S = 120.0
LARGEST_FOLLOWED = 2  # times the larger side of the job: pipelines scale frames once more; 1 if they take much memory
MUCH_BYTES = 128 * 1024 * 1024
MAX_DECODED_BYTES = 2 * 1024 * 1024 * 1024
_PADDING = 16  # pixels: frames are coded in blocks
_HD_HEIGHT = 720  # from which on untagged colours are those of BT.709
_TAGGED = {1: Colorspace.ITU709, 5: Colorspace.ITU601, 6: Colorspace.ITU601}

Frames = tuple[Image.Image, ...]


def decode_video(data: bytes, job: Job, param: str = "video") -> tuple[Frames, tuple[FieldWarning, ...]]:
    """Return the frames of a video at the times of the job's own, and warnings about what of it has no effect.

    Of a video that is extended they are all. Those to change are cropped to the job's size, and those to enlarge if
    they are larger than that and take much memory. Those to follow keep their proportions, as pipelines fit them into
    the image, and have at most twice the job's sides. `param` is the field of the video. Raises `UnusableInput`, also
    for too many frames in memory.
    """
    ref: InputRef | None = getattr(job, param)
    if ref is None or ref.fps is None or job.fps is None:
        raise UnusableInput("the video has no frame rate", param=param)
    _check_memory(job, ref, param)
    usable = frames_at(ref.frames, ref.fps, job.fps)
    wanted = usable if job.task is Task.EXTEND_VIDEO else job.frames
    try:
        # Nothing but the file itself is read: a MOV can name others.
        with av.open(io.BytesIO(data), "r", format="mov", options={"enable_drefs": "0"}) as container:
            stream = container.streams.video[0]
            _limit(stream, param)
            has_sound = bool(container.streams.audio)
            picked = _picked(_timed(_decoded(container, stream, ref, param), ref.fps), job, wanted, ref)
            frames = tuple(picked)
    except (av.error.FFmpegError, IndexError, ValueError, MemoryError) as error:
        raise UnusableInput(f"the video cannot be decoded: {error}"[:300], param=param) from error
    if len(frames) < wanted:
        message = f"the video has {len(frames)} frames that can be decoded, fewer than the {wanted} of the job"
        raise UnusableInput(message, param=param)
    return frames, _warnings(job, usable, param, has_sound=has_sound)


def _check_memory(job: Job, ref: InputRef, param: str) -> None:
    """Raise `UnusableInput` if the frames that a job uses take too much memory."""
    pixels = job.width * job.height
    if job.task is Task.UPSCALE_VIDEO:
        pixels = min(pixels, ref.width * ref.height)
    if job.task is Task.ANIMATE:
        scale = min(1.0, max(job.width, job.height) / max(ref.width, ref.height))
        pixels = int(ref.width * ref.height * scale**2)
    size = 3 * pixels * job.frames
    if size > MAX_DECODED_BYTES:
        message = f"the {job.frames} frames of the job take {size >> 20} MiB; make fewer, or smaller ones: at most "
        raise UnusableInput(f"{message}{MAX_DECODED_BYTES >> 20} MiB of a video are decoded", param=param)


def _limit(stream: VideoStream, param: str) -> None:
    """Bound the memory of the decoder, and refuse one that the file does not name."""
    context: VideoCodecContext | None = stream.codec_context
    if context is None:  # a damaged description of the codec
        raise UnusableInput("the video cannot be decoded: its coding is not known", param=param)
    if context.name not in {*CODECS.values(), "libdav1d"}:
        raise UnusableInput(f"the video is coded as {context.name}; send H.264, H.265, VP9 or AV1", param=param)
    context.thread_count = DECODER_THREADS
    context.options = {"max_pixels": str(MAX_VIDEO_PIXELS)}


def _decoded(container: InputContainer, stream: VideoStream, ref: InputRef, param: str) -> Iterator[VideoFrame]:
    """Yield the frames that are shown; raises `UnusableInput` after too long, also of frames that are not."""
    ends_s = time.monotonic() + LONGEST_S
    for packet in container.demux(stream):
        if time.monotonic() > ends_s:
            raise UnusableInput(f"the video takes more than {LONGEST_S:.0f} s to decode", param=param)
        for frame in packet.decode():
            _check_size(frame, ref, param)
            yield frame


def _check_size(frame: VideoFrame, ref: InputRef, param: str) -> None:
    """Raise `UnusableInput` for a frame that is larger than the file says, by which the model's limits were checked."""
    said, coded = sorted((ref.width, ref.height)), sorted((frame.width, frame.height))
    if any(side > most + _PADDING for side, most in zip(coded, said, strict=True)):
        message = f"the video has frames of {frame.width}x{frame.height} pixels; its file says {ref.width}x{ref.height}"
        raise UnusableInput(message, param=param)


def _timed(frames: Iterator[VideoFrame], fps: float) -> Iterator[tuple[float, VideoFrame]]:
    """Yield each frame with its time in seconds from that of the first one."""
    start: float | None = None
    for at, frame in enumerate(frames):
        shown = at / fps if frame.time is None else float(frame.time)
        start = shown if start is None else start
        yield shown - start, frame


def _picked(frames: Iterator[tuple[float, VideoFrame]], job: Job, wanted: int, ref: InputRef) -> Iterator[Image.Image]:
    """Yield the frame that shows at the time of each of the job's first frames: the last one that has begun."""
    total, fps = ref.frames, ref.fps or 1.0
    each, tolerance = seconds_per_frame(fps, job.fps or 1), tolerance_s(fps, job.fps or 1)
    shown: VideoFrame | None = None
    picture: Image.Image | None = None
    made = decoded = 0
    for begins, frame in frames:
        while shown is not None and made * each + tolerance < begins:
            picture = picture or _picture(shown, job)
            yield picture
            made += 1
            if made == wanted:
                return
        shown, picture = frame, None
        decoded += 1
    if shown is None or decoded < total - 1:  # it ends early
        return
    while made < wanted and made * each <= total / fps:
        picture = picture or _picture(shown, job)
        yield picture
        made += 1


def _picture(frame: VideoFrame, job: Job) -> Image.Image:
    """Return a frame upright, in the size that the job's pipeline gets."""
    unknown = Colorspace.ITU709 if frame.height >= _HD_HEIGHT else Colorspace.ITU601
    rgb = frame.reformat(
        format="rgb24",
        src_colorspace=_TAGGED.get(int(frame.colorspace), unknown),
        src_color_range=ColorRange.JPEG if int(frame.color_range) == ColorRange.JPEG else ColorRange.MPEG,
        dst_color_range=ColorRange.JPEG,
    )
    image: Image.Image = Image.fromarray(rgb.to_ndarray())
    if frame.rotation:
        image = image.rotate(frame.rotation, expand=True)
    if job.task is Task.ANIMATE:
        side = max(job.width, job.height)
        is_much = 3 * job.frames * (LARGEST_FOLLOWED * side) ** 2 > MUCH_BYTES
        image.thumbnail((side if is_much else LARGEST_FOLLOWED * side,) * 2, Image.Resampling.LANCZOS)
        return image
    pixels = image.width * image.height
    is_kept = pixels <= job.width * job.height or 3 * job.frames * pixels <= MUCH_BYTES
    if job.task is Task.UPSCALE_VIDEO and is_kept:
        return image
    return ImageOps.fit(image, (job.width, job.height), Image.Resampling.LANCZOS)


def _warnings(job: Job, usable: int, param: str, *, has_sound: bool) -> tuple[FieldWarning, ...]:
    messages = []
    if usable > job.frames:
        messages.append(f"{param}: its first {job.frames} of {usable} frames at {job.fps} fps are used")
    if has_sound and job.task is not Task.UPSCALE_VIDEO:  # which keeps it
        messages.append(f"{param}: its sound is not used; the result has none of it")
    return tuple(FieldWarning(param=param, message=message) for message in messages)
