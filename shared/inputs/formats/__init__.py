"""Formats of input images: each module checks a file's structure and strips it to its image data, without decoding."""

from dataclasses import dataclass

MAX_SIDE = 65_535
"""The longest side of a JPEG. Longer strips of one pixel exist only in attacks."""


class FormatFault(ValueError):
    """A file that is damaged, or of a kind that is not supported; the message completes "the image ..."."""


@dataclass(frozen=True)
class StrippedImage:
    """An image file without metadata; `width` and `height` are those of the stored pixels, before `orientation`."""

    width: int
    height: int
    orientation: int
    data: bytes


def damaged(detail: str) -> FormatFault:
    """Return the fault of a file that breaks the rules of its format."""
    return FormatFault(f"is damaged or truncated: {detail}")


def joined(parts: list[bytes | memoryview], original: bytes) -> bytes:
    """Return the parts as one file; `original` itself, not a copy, if they are equal."""
    result = b"".join(parts)
    return original if result == original else result
