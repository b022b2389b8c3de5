"""Mutated images against the validation of inputs: `run` reports what it has tried and what broke a promise.

An image is accepted or refused with `InputRejected`, in bounded time; what is kept of it decodes to the same pixels
and has no part that is not image data.
"""

from __future__ import annotations

import io
import logging
import random
import resource
import struct
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from PIL import Image

from fuzz import hostile_images
from fuzz.hostile_images import noise, saved, with_metadata
from shared.errors import InputRejected
from shared.inputs.formats import exif
from shared.inputs.validation import ImageFile, inspect

MAX_BYTES = 4_000_000
MAX_PIXELS = 40_000_000
CPU_S = 1.0
"""For one image; a hundredth is usual."""

GROWTH_MIB = 100
_COMPARED_PIXELS = 500_000  # larger ones are only validated
_KEPT_BYTES = 64  # of an orientation and of plain JFIF and Adobe segments
_KEPT_PARTS = {
    "png": {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"eXIf"},
    "jpeg": {0xD8, 0xE0, 0xE1, 0xEE, 0xC0, 0xC1, 0xC2, 0xC4, 0xDB, 0xDD, 0xDA, 0xD9},
    "webp": {b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"EXIF"},
}

_IN_SCANS = {b"\0", b"\xff", *(bytes((marker,)) for marker in range(0xD0, 0xD8))}  # after 0xFF; another one is fill

Parts = list[bytes]


def corpus() -> dict[str, bytes]:
    """Return small valid files of every kind and mode."""
    modes = {f"png {mode}": saved(noise(mode=mode), "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")}
    return modes | {
        "png with a transparent colour": saved(noise(), "PNG", transparency=(9, 9, 9)),
        "png with a transparent entry": saved(noise(mode="P"), "PNG", transparency=bytes(range(200))),
        "png interlaced": hostile_images.flat_png(40, 30, interlaced=True),
        "png of 16 bits with alpha": hostile_images.flat_png(40, 30, colour=6, depth=16),
        **{f"jpeg {mode}": saved(noise(mode=mode), "JPEG") for mode in ("L", "RGB", "CMYK")},
        **{f"jpeg subsampling {ratio}": saved(noise(), "JPEG", subsampling=ratio) for ratio in (0, 1, 2)},
        "jpeg progressive": saved(noise(200, 150), "JPEG", progressive=True),
        "jpeg progressive cmyk": saved(noise(mode="CMYK"), "JPEG", progressive=True),
        "jpeg with restarts": saved(noise(200, 150), "JPEG", restart_marker_blocks=2),
        "jpeg of rgb": saved(noise(), "JPEG", keep_rgb=True),
        "webp": saved(noise(), "WEBP"),
        "webp lossless": saved(noise(), "WEBP", lossless=True),
        "webp with alpha": saved(noise(mode="RGBA"), "WEBP"),
        "webp lossless with alpha": saved(noise(mode="RGBA"), "WEBP", lossless=True),
    }


def split(data: bytes) -> Parts:
    """Return a file as its signature, its chunks or segments, and the rest."""
    if data.startswith(b"\x89PNG"):
        return _split(data, 8, lambda at: 12 + int.from_bytes(data[at : at + 4], "big"))
    if data.startswith(b"RIFF"):
        return _split(data, 12, lambda at: 8 + (int.from_bytes(data[at + 4 : at + 8], "little") + 1) // 2 * 2)
    return _split(data, 2, lambda at: _segment_bytes(data, at))


def _split(data: bytes, at: int, length: Callable[[int], int]) -> Parts:
    parts = [data[:at]]
    while at < len(data):
        end = at + max(1, length(at))
        parts.append(data[at:end])
        at = end
    return parts


def _segment_bytes(data: bytes, at: int) -> int:
    if data[at : at + 2] == b"\xff\xd9":
        return 2
    end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    while data[at : at + 2] == b"\xff\xda" and end < len(data):
        if data[end] == 0xFF and data[end + 1 : end + 2] not in _IN_SCANS:
            break
        end += 1
    return end - at


def _names(data: bytes, kind: str) -> set[Any]:
    parts = split(data)[1:]
    if kind == "png":
        return {part[4:8] for part in parts}
    return {part[:4] for part in parts} if kind == "webp" else {0xD8, *(part[1] for part in parts)}


def mutated(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Return `data` with its parts rearranged, its bytes damaged, or both; often with sizes and checksums set right."""
    parts = split(data)
    for _ in range(chance.choice((0, 1, 1, 2, 4))):
        at, other = chance.randrange(len(parts)), split(chance.choice(others))
        match chance.randrange(6):
            case 0:
                parts.insert(at, chance.choice(parts))
            case 1:
                del parts[at]
            case 2:
                parts.insert(at, chance.choice(other))
            case 3:
                to = chance.randrange(len(parts))
                parts[at], parts[to] = parts[to], parts[at]
            case 4:
                parts[at] = _damaged(parts[at], chance)
            case _:
                parts[at:] = other[chance.randrange(len(other)) :]
        if not parts:
            return b""
    if chance.random() < 0.8:
        parts = _sealed(parts)
    result = b"".join(parts)
    if chance.random() < 0.15:
        result = result[: chance.randrange(len(result) + 1)]
    return _damaged(result, chance) if chance.random() < 0.15 else result


def _damaged(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(chance.randint(1, 4)):
        at = min(chance.randrange(len(changed)), chance.choice((len(changed), 16, 64)) - 1)
        changed[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    return bytes(changed)


def _sealed(parts: Parts) -> Parts:
    """Return the parts with right lengths and checksums, so that faults inside of them are reached."""
    if parts[0].startswith(b"\x89PNG"):
        chunks = [part for part in parts[1:] if len(part) >= 12]
        return [parts[0], *(hostile_images.png_chunk(chunk[4:8], chunk[8:-4]) for chunk in chunks)]
    if parts[0].startswith(b"RIFF") and len(parts[0]) == 12:
        return [b"RIFF" + struct.pack("<I", 4 + sum(map(len, parts[1:]))) + b"WEBP", *parts[1:]]
    return parts


def _decoded(data: bytes) -> tuple[str, tuple[int, int], bytes] | None:
    """Return the pixels, or None if Pillow cannot decode the file."""
    try:
        with Image.open(io.BytesIO(data), formats=["PNG", "JPEG", "WEBP"]) as image:
            shown = image.convert("RGBA") if image.has_transparency_data else image
            shown.load()
            return shown.mode, shown.size, shown.tobytes()
    except Exception:  # Pillow's readers raise many types
        return None


def problems_of(data: bytes, image: ImageFile) -> Iterator[str]:
    """Yield the promises that a stored image breaks."""
    kind = image.content_type.removeprefix("image/")
    if len(image.data) > len(data) + _KEPT_BYTES:
        yield f"{len(data)} bytes became {len(image.data)}"
    if inspect(image.data, max_bytes=MAX_BYTES + _KEPT_BYTES, max_pixels=MAX_PIXELS) != image:
        yield "what is stored is stripped again"
    if extra := _names(image.data, kind) - _KEPT_PARTS[kind]:
        yield f"stored parts: {sorted(extra)}"
    if hostile_images.SECRET in b"".join(part for part in split(image.data) if part[1:2] == b"\xe1"):
        yield "stored metadata"
    if image.width * image.height > _COMPARED_PIXELS:
        return
    before, after = _decoded(data), _decoded(image.data)
    if before is not None and before != after:
        yield f"pixels changed: {before[:2]} to {None if after is None else after[:2]}"
    if after is not None and after[1] not in ((image.width, image.height), (image.height, image.width)):
        yield f"a size of {image.width}x{image.height} for {after[1]}"


def try_image(data: bytes, outcomes: Counter[str]) -> list[str]:
    """Validate one file, count its outcome, and return the promises that were broken."""
    started = time.thread_time()
    try:
        image = inspect(data, max_bytes=MAX_BYTES, max_pixels=MAX_PIXELS)
    except InputRejected:
        outcomes["rejected"] += 1
        return []
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        outcomes["slowest_ms"] = max(outcomes["slowest_ms"], round(1000 * (time.thread_time() - started)))
    outcomes["accepted"] += 1
    return list(problems_of(data, image))


def run(seed: int, seconds: float, least: int = 0) -> dict[str, Any]:
    """Try mutated images for `seconds`, and `least` of them in any case.

    `problems` has the first bytes of each file that broke a promise.
    """
    chance, until_s = random.Random(seed), time.monotonic() + seconds
    files = [*corpus().values(), *(with_metadata(data, chance.randrange(9)) for data in corpus().values())]
    files += hostile_images.hostile("huge exif", "text bomb", "strip", "webp of 40 megapixels").values()
    files.append(hostile_images.png_chunk(b"eXIf", exif.orientation_block(6)))  # and what is no file at all
    outcomes: Counter[str] = Counter(accepted=0, rejected=0, slowest_ms=0)
    problems: list[str] = []
    peak = _peak_mib()
    with warnings.catch_warnings():  # Pillow's, of the comparison
        warnings.simplefilter("ignore")
        logging.getLogger("PIL").setLevel(logging.CRITICAL)
        while (time.monotonic() < until_s or _tried(outcomes) < least) and len(problems) < 10:
            data = mutated(chance.choice(files), files, chance)
            problems += [f"{problem}: {data[:2000].hex()}" for problem in try_image(data, outcomes)]
    if outcomes["slowest_ms"] > 1000 * CPU_S:
        problems.append(f"an image took {outcomes['slowest_ms']} ms of CPU")
    if _peak_mib() - peak > GROWTH_MIB:
        problems.append(f"memory grew by {_peak_mib() - peak} MiB")
    return {**outcomes, "problems": problems}


def _tried(outcomes: Counter[str]) -> int:
    return outcomes["accepted"] + outcomes["rejected"]


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
