"""MP4 and MOV: reads the boxes that say what the video is, and blanks those that hold metadata.

Frames are not decoded. Blanked boxes keep their size, as others count bytes from the start of the file.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shared.inputs.formats import FormatFault, damaged

CODECS = {
    **dict.fromkeys(("avc1", "avc3"), "h264"),
    **dict.fromkeys(("hvc1", "hev1"), "hevc"),
    **{"vp08": "vp8", "vp09": "vp9", "av01": "av1", "mp4v": "mpeg4"},
}
"""Decoders by the name of a format in the file."""

MAX_BOXES = 10_000
MAX_TRACKS = 100
MAX_RATES = 100_000
"""Entries of the table of durations, one for each change of the frame rate."""

_IMAGE_BRANDS = frozenset({b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"avif", b"avis"})
_METADATA = frozenset({b"udta", b"meta", b"uuid", b"cprt", b"Xtra"})  # places, devices, titles, thumbnails
_DELAY = 4  # frames: encoders add as many to a track's duration for those that are coded out of order
_BLANK = bytes(4096)
_PARENTS = frozenset({b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts"})


@dataclass(frozen=True)
class StrippedVideo:
    """A video file without metadata; width and height are upright. `fps` is the mean rate of its frames; its edit list
    hides `hidden_frames` more, which can take as long to decode."""

    width: int
    height: int
    frames: int
    fps: float
    hidden_frames: int
    is_quicktime: bool
    data: bytes


class _Box(NamedTuple):
    name: bytes
    start: int
    body: int
    end: int


def is_file(data: bytes) -> bool:
    """Return whether data begin like an MP4 or MOV, and not like an image in such a container."""
    return data[4:8] == b"ftyp" and data[8:12] not in _IMAGE_BRANDS


def strip(data: bytes) -> StrippedVideo:
    """Return the file without its metadata, and what its first video track says; raises `FormatFault`."""
    boxes = _tree(data)
    movie = _only(boxes, b"moov")
    if any(box.name == b"mvex" for box in _boxes(data, movie.body, movie.end)):
        raise FormatFault("is fragmented; save it as one piece: ffmpeg -i IN -c copy OUT.mp4")
    inside = next((inside for inside in _tracks(boxes) if _is_video(data, inside)), None)
    if inside is None:
        raise FormatFault("has no video track")
    width, height = _size(data, _only(inside, b"stsd"))
    frames, fps, samples = _timing(data, inside, _field(data, _only(boxes, b"mvhd"), (12, 20)))
    if _is_sideways(data, _only(inside, b"tkhd")):
        width, height = height, width
    return StrippedVideo(width, height, frames, fps, samples - frames, data[8:12] == b"qt  ", _blanked(data, boxes))


def _tree(data: bytes) -> list[_Box]:
    """Return all boxes, parents before their children."""
    found: list[_Box] = []
    waiting = list(_boxes(data, 0, len(data)))[::-1]
    while waiting:
        box = waiting.pop()
        found.append(box)
        if len(found) + len(waiting) > MAX_BOXES:
            raise damaged("it has too many boxes")
        if box.name in _PARENTS:
            waiting += list(_boxes(data, box.body, box.end))[::-1]
    return found


def _boxes(data: bytes, at: int, end: int) -> Iterator[_Box]:
    count = 0
    while at + 8 <= end:
        size, name = struct.unpack_from(">I4s", data, at)
        body = at + 8
        if size == 1 and at + 16 <= end:
            (size,) = struct.unpack_from(">Q", data, at + 8)
            body = at + 16
        stop = end if size == 0 else at + size
        count += 1
        if stop < body or stop > end or count > MAX_BOXES:
            raise damaged("it ends early")
        yield _Box(name, at, body, stop)
        at = stop


def _tracks(boxes: list[_Box]) -> Iterator[list[_Box]]:
    """Yield the boxes inside each track; they follow it, as parents come before their children."""
    tracks = [at for at, box in enumerate(boxes) if box.name == b"trak"]
    if len(tracks) > MAX_TRACKS:
        raise damaged(f"it has {len(tracks)} tracks")
    for at in tracks:
        last = next((after for after in range(at + 1, len(boxes)) if boxes[after].start >= boxes[at].end), len(boxes))
        yield boxes[at + 1 : last]


def _only(boxes: list[_Box], name: bytes) -> _Box:
    found = [box for box in boxes if box.name == name]
    if len(found) != 1:
        raise damaged(f"it has {len(found)} {name.decode()} boxes")
    return found[0]


def _is_video(data: bytes, inside: list[_Box]) -> bool:
    return any(box.name == b"hdlr" and data[box.body + 8 : box.body + 12] == b"vide" for box in inside)


def _numbers(data: bytes, box: _Box, at: int, form: str) -> tuple[int, ...]:
    start = box.body + at
    if start + struct.calcsize(form) > box.end:
        raise damaged(f"its {box.name.decode()} box is too short")
    return struct.unpack_from(form, data, start)


def _field(data: bytes, box: _Box, offsets: tuple[int, int]) -> int:
    """Return a 32-bit number of a box, by its offset in version 0 and in version 1."""
    (version,) = _numbers(data, box, 0, ">B")
    return _numbers(data, box, offsets[min(version, 1)], ">I")[0]


def _size(data: bytes, box: _Box) -> tuple[int, int]:
    (count,) = _numbers(data, box, 4, ">I")
    if count != 1:
        raise FormatFault(f"has {count} formats in its video track; it must have one")
    (name,) = struct.unpack(">4s", struct.pack(">I", _numbers(data, box, 12, ">I")[0]))
    codec = name.decode("latin-1")
    if codec not in CODECS:
        shown = codec if codec.isprintable() else name.hex()
        raise FormatFault(f"is coded as {shown}; send H.264, H.265, VP9 or AV1")
    width, height = _numbers(data, box, 40, ">HH")
    if not width or not height:
        raise damaged("the size of its frames")
    return width, height


def _is_sideways(data: bytes, box: _Box) -> bool:
    """Return whether players turn the video by a quarter."""
    (version,) = _numbers(data, box, 0, ">B")
    a, _, _, _, d = _numbers(data, box, 52 if version else 40, ">5i")
    return a == 0 and d == 0


def _timing(data: bytes, inside: list[_Box], movie_scale: int) -> tuple[int, float, int]:
    """Return the number of frames that are shown, their mean rate, and the number of all."""
    scale = _field(data, _only(inside, b"mdhd"), (12, 20))
    table = _only(inside, b"stts")
    (count,) = _numbers(data, table, 4, ">I")
    if count > MAX_RATES:
        raise FormatFault("changes its frame rate too often")
    entries = _numbers(data, table, 8, f">{2 * count}I")
    samples = sum(entries[::2])
    decoded = sum(number * each for number, each in zip(entries[::2], entries[1::2], strict=True))
    # Those times are of decoding: with frames that are coded out of order, they can end before a long last one.
    whole = _duration(data, _only(inside, b"mdhd"))
    duration = whole if (whole - decoded) * samples > _DELAY * decoded else decoded
    if not samples:
        raise FormatFault("has no frames")
    if not decoded or not scale:
        raise damaged("the times of its frames")
    fps = samples * scale / duration
    edited_s = _edited_s(data, inside, movie_scale)
    frames = samples if edited_s is None else min(samples, max(1, round(edited_s * fps)))
    return frames, fps, samples


def _duration(data: bytes, box: _Box) -> int:
    """Return the duration of a track by its header; 0 if it is not known."""
    (version,) = _numbers(data, box, 0, ">B")
    offset, form = (24, ">Q") if version else (16, ">I")
    (duration,) = _numbers(data, box, offset, form)
    return 0 if duration == 256 ** struct.calcsize(form) - 1 else duration


def _edited_s(data: bytes, inside: list[_Box], movie_scale: int) -> float | None:
    """Return the seconds that the track's edit list shows; None without one."""
    box = next((box for box in inside if box.name == b"elst"), None)
    if box is None or not movie_scale:
        return None
    (version,) = _numbers(data, box, 0, ">B")
    (count,) = _numbers(data, box, 4, ">I")
    if count > MAX_BOXES:
        raise damaged("its edit list is too long")
    form = "Qqi" if version else "Iii"
    entries = _numbers(data, box, 8, f">{form * count}")
    shown = sum(length for length, begins in zip(entries[::3], entries[1::3], strict=True) if begins >= 0)
    return shown / movie_scale if shown else None


def _blanked(data: bytes, boxes: list[_Box]) -> bytes:
    """Return the file with its metadata overwritten; `data` itself, not a copy, if it has none."""
    metadata = [box for box in boxes if box.name in _METADATA]
    if not metadata:
        return data
    kept: list[bytes | memoryview] = []
    at, view = 0, memoryview(data)
    for box in metadata:
        kept += [view[at : box.start + 4], b"free", view[box.start + 8 : box.body], *_zeros(box.end - box.body)]
        at = box.end
    return b"".join((*kept, view[at:]))


def _zeros(size: int) -> Iterator[bytes]:
    """Yield so many zeros, of few bytes of memory."""
    yield from [_BLANK] * (size // len(_BLANK))
    yield _BLANK[: size % len(_BLANK)]
