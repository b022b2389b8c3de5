"""Validation of input images, videos and sounds from untrusted clients.

Nothing is decoded here: the structure of a file is checked, and its metadata are dropped. Time and memory depend on
the bytes that a client sends, not on the pixels that they declare; workers decode.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.errors import InputRejected
from shared.inputs.formats import FormatFault, StrippedImage, audio, exif, jpeg, latents, mp4, png, webp
from shared.job_fields import MAX_DURATION_S
from shared.tasks import LATENTS_TYPE, VIDEO_TYPES

_STRIP: Mapping[str, Callable[[bytes], StrippedImage]] = {"png": png.strip, "jpeg": jpeg.strip, "webp": webp.strip}
_LATENTS = "latents"
_VIDEO = "video"
VIDEO_FIELDS = ("video", "face_video")
"""Fields of requests that take a video."""
MAX_VIDEO_PIXELS = 4096 * 2304
"""Of a frame: a decoder keeps up to 16 of them, 220 MiB."""

_KNOWN_OTHERS = (
    (b"GIF8", "a GIF"),
    (b"BM", "a BMP"),
    (b"II*\0", "a TIFF"),
    (b"MM\0*", "a TIFF"),
    (b"%PDF", "a PDF"),
    (b"\x1aE\xdf\xa3", "WebM or Matroska"),
    (b"<", "text or SVG"),
    (b"{", "JSON"),
)


@dataclass(frozen=True)
class ImageFile:
    """An image file that holds nothing but its image and its orientation; width and height are upright.

    Or a file of latents, with their own sides; a video, with its `frames` and their mean rate; or a sound, without any
    sides.
    """

    content_type: str
    width: int
    height: int
    data: bytes
    frames: int = 0
    fps: float | None = None
    hidden_frames: int = 0
    duration_s: float | None = None


def inspect(data: bytes, *, max_bytes: int, max_pixels: int, param: str = "image") -> ImageFile:
    """Return an image file without its metadata, or raise `InputRejected` naming `param`.

    Text, colour profiles, thumbnails and bytes after the end of the image are dropped; the pixels are the same.
    """
    if len(data) > max_bytes:
        raise InputRejected(f"{param}: {len(data)} bytes; at most {max_bytes} are allowed", param=param)
    sound = audio.audio_format(data)
    if sound is not None:
        return _inspect_audio(data, sound, param)
    kind = _kind(data, param)
    if kind == _LATENTS:
        return _inspect_latents(data, param)
    if kind == _VIDEO:
        return _inspect_video(data, param)
    try:
        image = _STRIP[kind](data)
    except FormatFault as fault:
        raise InputRejected(f"{param}: the {kind.upper()} {fault}", param=param) from fault
    width, height = image.width, image.height
    if width * height > max_pixels:
        raise InputRejected(f"{param}: {width}x{height} pixels; at most {max_pixels} are allowed", param=param)
    if image.orientation in exif.SIDEWAYS:
        width, height = height, width
    return ImageFile(f"image/{kind}", width, height, image.data)


def _inspect_audio(data: bytes, kind: str, param: str) -> ImageFile:
    try:
        found = audio.strip(data, kind)
    except FormatFault as fault:
        raise InputRejected(f"{param}: the {kind.upper()} file {fault}", param=param) from fault
    if found.duration_s > MAX_DURATION_S:
        message = f"{param}: {found.duration_s:.0f} seconds; at most {MAX_DURATION_S:.0f} are allowed"
        raise InputRejected(message, param=param)
    return ImageFile(found.content_type, 0, 0, found.data, duration_s=round(found.duration_s, 3))


def _inspect_latents(data: bytes, param: str) -> ImageFile:
    try:
        found = latents.strip(data)
    except FormatFault as fault:
        raise InputRejected(f"{param}: the file of latents is refused: {fault}", param=param) from fault
    return ImageFile(LATENTS_TYPE, found.width, found.height, found.data)


def _inspect_video(data: bytes, param: str) -> ImageFile:
    try:
        video = mp4.strip(data)
    except FormatFault as fault:
        raise InputRejected(f"{param}: the video {fault}", param=param) from fault
    width, height = video.width, video.height
    if width * height > MAX_VIDEO_PIXELS:
        message = f"{param}: a video of {width}x{height} pixels; at most {MAX_VIDEO_PIXELS} are allowed"
        raise InputRejected(message, param=param)
    return ImageFile(
        VIDEO_TYPES[video.is_quicktime], width, height, video.data, video.frames, video.fps, video.hidden_frames
    )


def _kind(data: bytes, param: str) -> str:
    if data.startswith(png.SIGNATURE):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "webp"
    if latents.is_file(data):
        return _LATENTS
    if mp4.is_file(data):
        return _VIDEO
    if not data:
        raise InputRejected(f"{param}: the {'video' if param in VIDEO_FIELDS else 'image'} is empty", param=param)
    other = next((name for magic, name in _KNOWN_OTHERS if data[:64].lstrip().startswith(magic)), None)
    if data[4:8] == b"ftyp":
        other = "HEIC or AVIF"
    if param == "audio":
        raise InputRejected(f"{param}: unsupported audio; send a WAV, FLAC, MP3, or Ogg (Opus, Vorbis)", param=param)
    seen = f": {other}" if other else ""
    if param in VIDEO_FIELDS:
        raise InputRejected(f"{param}: unsupported video{seen}; send an MP4 or MOV", param=param)
    remedy = "send a PNG, JPEG or WebP"
    if param == "file":  # of an upload, whose use is not known yet
        remedy += ", an MP4 or MOV, or a WAV, FLAC, MP3 or Ogg"
    raise InputRejected(f"{param}: unsupported image{seen}; {remedy}", param=param)
