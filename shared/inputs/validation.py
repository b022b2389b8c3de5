"""Validation of input images from untrusted clients.

The type is detected from the content, and the size is checked in the header before decoding, so that an image with too
many pixels uses no memory.
"""

import struct
import zlib
from dataclasses import dataclass
from io import BytesIO

from PIL import Image

from shared.errors import InputRejected

_KINDS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
_KNOWN_OTHERS = (
    (b"GIF8", "a GIF"),
    (b"BM", "a BMP"),
    (b"II*\0", "a TIFF"),
    (b"MM\0*", "a TIFF"),
    (b"%PDF", "a PDF"),
    (b"<", "text or SVG"),
    (b"{", "JSON"),
)
# A progressive JPEG can have thousands of tiny scans: seconds of CPU per kilobyte. Encoders write about 10.
# Within a scan 0xFF is followed by 0, so counting the marker does not count pixels.
_MAX_SCANS = 64
_ORIENTATION = 0x0112
_SIDEWAYS = (5, 6, 7, 8)
# Exceptions of Pillow's decoders for broken files (UnidentifiedImageError is an OSError).
_BROKEN = (OSError, SyntaxError, ValueError, struct.error, zlib.error, EOFError, IndexError, KeyError, TypeError)
_RARELY_BROKEN = (AttributeError, RuntimeError, OverflowError, ZeroDivisionError, MemoryError)
_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)


@dataclass(frozen=True)
class ImageInfo:
    """A decodable image; width and height include its EXIF orientation."""

    content_type: str
    width: int
    height: int


def inspect(data: bytes, *, max_bytes: int, max_pixels: int, param: str = "image") -> ImageInfo:
    """Return the facts of an image file, or raise `InputRejected` naming `param`.

    Blocks while decoding up to `max_pixels`. Bytes after the end of the image are ignored.
    """
    if len(data) > max_bytes:
        raise InputRejected(f"the image has {len(data)} bytes; at most {max_bytes} are allowed", param=param)
    kind = _kind(data, param)
    declared = _declared_size(data, kind)
    if declared is not None:
        _check_pixels(declared, max_pixels, param)
    try:
        with Image.open(BytesIO(data), formats=[kind]) as image:
            _check_pixels(image.size, max_pixels, param)
            if kind != "JPEG" and getattr(image, "n_frames", 1) > 1:  # phones add frames to JPEGs
                raise InputRejected("the image is animated; send a single frame", param=param)
            if kind == "JPEG" and data.count(b"\xff\xda") > _MAX_SCANS:
                raise InputRejected(f"the JPEG has more than {_MAX_SCANS} scans; save it with fewer", param=param)
            width, height = image.size
            image.draft(None, (1, 1))  # decodes a JPEG completely, but at 1/8 of its size: 1/64 of the memory
            image.load()
            if image.getexif().get(_ORIENTATION) in _SIDEWAYS:
                width, height = height, width
    except _BOMB as error:
        raise InputRejected(f"the image has more than {max_pixels} pixels", param=param) from error
    except (*_BROKEN, *_RARELY_BROKEN) as error:
        raise InputRejected(f"the {kind} cannot be decoded; it is damaged or truncated", param=param) from error
    return ImageInfo(_KINDS[kind], width, height)


def _kind(data: bytes, param: str) -> str:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if not data:
        raise InputRejected("the image is empty", param=param)
    other = next((name for magic, name in _KNOWN_OTHERS if data[:64].lstrip().startswith(magic)), None)
    if data[4:8] == b"ftyp":
        other = "HEIC, AVIF or a video"
    raise InputRejected(f"unsupported image{f': {other}' if other else ''}; send a PNG, JPEG or WebP", param=param)


def _declared_size(data: bytes, kind: str) -> tuple[int, int] | None:
    """Return the size in the header, or None if Pillow reads it safely.

    Pillow's WebP decoder allocates its canvas on opening; a JPEG is read lazily.
    """
    if kind == "PNG" and data[12:16] == b"IHDR" and len(data) >= 24:
        return struct.unpack(">II", data[16:24])
    if kind == "WEBP" and len(data) >= 30:
        chunk = data[12:16]
        if chunk == b"VP8X":
            return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
        if chunk == b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return (bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1
        if chunk == b"VP8 ":
            return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return None


def _check_pixels(size: tuple[int, int], max_pixels: int, param: str) -> None:
    width, height = size
    if width * height > max_pixels:
        raise InputRejected(f"the image has {width}x{height} pixels; at most {max_pixels} are allowed", param=param)
