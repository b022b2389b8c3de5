"""From the images, videos and sounds that a program gives, in any form, to checked files."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

from shared.errors import InvalidRequest
from shared.inputs.validation import ImageFile, inspect

ImageLike: TypeAlias = Image.Image | bytes | str | Path | np.ndarray
_MAX_BYTES = 1 << 30
_PATHS_ONLY = ("audio", "video", "face_video")  # and bytes
_MODES_OF_PNG = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
_MODES_WITH_ALPHA = {"PA": "RGBA", "RGBa": "RGBA", "La": "LA"}


def file_of(value: ImageLike, param: str, max_pixels: int) -> ImageFile:
    """Return an image, video or sound of any form as a checked file; raises `InvalidRequest` that names its field."""
    return inspect(_bytes(value, param), max_bytes=_MAX_BYTES, max_pixels=max_pixels, param=param)


def _bytes(value: ImageLike, param: str) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, np.ndarray | Image.Image) and param not in _PATHS_ONLY:
        return _png(value, param)
    try:
        return Path(value).read_bytes()  # type: ignore[arg-type]  # refused below
    except TypeError:
        kinds = "a path or bytes" if param in _PATHS_ONLY else "a path, bytes, an image of Pillow or an array"
        raise InvalidRequest(f"{param}: it must be {kinds}, not {type(value).__name__}", param=param) from None
    except OSError as error:
        raise InvalidRequest(f"{param}: {value}: {error.strerror}", param=param) from error
    except ValueError as error:  # a path with a null byte
        raise InvalidRequest(f"{param}: {str(value)[:200]!r} is no path: {error}", param=param) from error


def _png(value: Image.Image | np.ndarray, param: str) -> bytes:
    if isinstance(value, np.ndarray) and value.dtype.kind not in "bui":
        message = f"{param}: an array must have whole numbers of 0 to 255 (uint8), not {value.dtype}"
        raise InvalidRequest(message, param=param)
    file = BytesIO()
    try:
        image = Image.fromarray(value) if isinstance(value, np.ndarray) else value
        if image.mode not in _MODES_OF_PNG:
            image = image.convert(_MODES_WITH_ALPHA.get(image.mode, "RGB"))
        image.save(file, "PNG", compress_level=1)
    except (OSError, TypeError, ValueError, SystemError) as error:  # an array of five channels, a truncated file
        raise InvalidRequest(f"{param}: it cannot be read as an image: {error}", param=param) from error
    return file.getvalue()
