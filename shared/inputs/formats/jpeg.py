"""JPEG: checks its segments, and keeps those that decide pixels."""

import re
import struct

from shared.inputs.formats import FormatFault, StrippedImage, damaged, exif, joined

_MAX_SEGMENTS = 2000
# A progressive JPEG can have thousands of tiny scans: seconds of CPU per kilobyte. Encoders write about 10.
_MAX_SCANS = 64
_START, _END, _SCAN, _EXIF, _JFIF, _ADOBE = 0xD8, 0xD9, 0xDA, 0xE1, 0xE0, 0xEE
_HUFFMAN, _QUANTIZATION, _RESTART_INTERVAL = 0xC4, 0xDB, 0xDD
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
_DROPPED = (*range(0xE0, 0xF0), 0xFE, 0xDC)  # application data, comments, number of lines
_MAX_BLOCKS = 10  # in a unit of an interleaved scan, by the standard
# Within a scan 0xFF is followed by 0 or by a restart marker.
_SCAN_END = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_FILL = re.compile(rb"\xff*")
_SEARCH_BYTES = 256 * 1024  # a search keeps Python's lock: 1 ms
# Their presence decides the colour space. What else they hold, a thumbnail for example, is dropped.
_PLAIN_JFIF = b"\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
_PLAIN_ADOBE = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"


class _Segments:
    """What has been read of one file."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self.orientation = exif.UPRIGHT
        self.width = self.height = self.scans = 0
        self.components: frozenset[int] = frozenset()
        self.jfif = False
        self.adobe: int | None = None

    def add(self, marker: int, body: memoryview, whole: memoryview) -> None:
        """Check one segment, and keep `whole` if it decides pixels."""
        if marker in _FRAMES:
            self._read_frame(body)
        elif marker in _OTHER_FRAMES:
            raise FormatFault("is a lossless, hierarchical or arithmetic JPEG; save it as baseline or progressive")
        elif marker == _HUFFMAN:
            _check_huffman(body)
        elif marker == _QUANTIZATION:
            _check_quantization(body)
        elif marker == _SCAN:
            self._read_scan(body)
        elif marker in _DROPPED:
            self._read_application(marker, body)
            return
        elif marker != _RESTART_INTERVAL or len(body) != 2:
            raise damaged(f"marker {marker:02x}")
        self.parts.append(whole)

    def _read_frame(self, body: memoryview) -> None:
        if self.width or len(body) < 6:
            raise damaged("frame header")
        precision, self.height, self.width, count = struct.unpack_from(">BHHB", body)
        if precision != 8:
            raise FormatFault(f"has {precision} bits per sample; save it with 8")
        if not (self.width and self.height) or count not in (1, 3, 4) or len(body) != 6 + 3 * count:
            raise damaged("frame header")
        factors = [(byte >> 4, byte & 15) for byte in body[7::3]]
        self.components = frozenset(body[6::3])
        valid = all(1 <= across <= 4 and 1 <= down <= 4 for across, down in factors)
        too_many = count > 1 and sum(across * down for across, down in factors) > _MAX_BLOCKS
        if not valid or too_many or len(self.components) != count or any(table > 3 for table in body[8::3]):
            raise damaged("frame header")

    def _read_scan(self, body: memoryview) -> None:
        count = body[0] if body else 0
        used = body[1 : 1 + 2 * count : 2]
        if not 1 <= count <= 4 or len(body) != 4 + 2 * count or not self.components.issuperset(used):
            raise damaged("scan header")
        self.scans += 1
        if self.scans > _MAX_SCANS:
            raise FormatFault(f"has more than {_MAX_SCANS} scans; save it with fewer")

    def _read_application(self, marker: int, body: memoryview) -> None:
        if self.scans:
            return  # decoders have chosen the colour space
        if marker == _JFIF and len(body) >= 14 and bytes(body[:5]) == b"JFIF\0":
            self.jfif = True
        elif marker == _ADOBE and len(body) >= 12 and bytes(body[:5]) == b"Adobe":
            self.adobe = body[11]
        elif marker == _EXIF and bytes(body[:6]) == b"Exif\0\0" and self.orientation == exif.UPRIGHT:
            self.orientation = exif.read_orientation(body)

    def head(self) -> list[bytes | memoryview]:
        """Return the start of the file, up to the first kept segment."""
        head: list[bytes | memoryview] = [bytes((0xFF, _START))]
        if self.jfif:
            head.append(_PLAIN_JFIF)
        if self.adobe is not None:
            head.append(_PLAIN_ADOBE + bytes((self.adobe,)))
        if self.orientation != exif.UPRIGHT:
            block = b"Exif\0\0" + exif.orientation_block(self.orientation)
            head.append(struct.pack(">BBH", 0xFF, _EXIF, 2 + len(block)) + block)
        return head


def strip(data: bytes) -> StrippedImage:
    """Return a JPEG as its tables and scans, up to its end; raises `FormatFault`. Scans are not decoded."""
    segments, view, at = _Segments(), memoryview(data), 2
    for _ in range(_MAX_SEGMENTS):
        marker, at = _marker(data, at)
        if marker == _END:
            break
        if at + 2 > len(data):
            raise damaged("it ends early")
        (length,) = struct.unpack_from(">H", data, at)
        end = at + length
        if length < 2 or end > len(data):
            raise damaged("it ends early")
        if marker == _SCAN:
            end = _scan_end(data, end)
        segments.add(marker, view[at + 2 : at + length], view[at - 2 : end])
        at = end
    else:
        raise damaged("it has too many segments")
    if not segments.scans:
        raise damaged("it has no pixels")
    parts = [*segments.head(), *segments.parts, bytes((0xFF, _END))]
    return StrippedImage(segments.width, segments.height, segments.orientation, joined(parts, data))


def _marker(data: bytes, at: int) -> tuple[int, int]:
    """Return the marker at `at`, after any fill bytes, and the position after it."""
    fill = _FILL.match(data, at)
    after = at if fill is None else fill.end()
    if after == at or after >= len(data):
        raise damaged("it ends early" if after >= len(data) else "a segment is longer than its length")
    return data[after], after + 1


def _scan_end(data: bytes, at: int) -> int:
    """Return where the entropy-coded data from `at` end: at the next marker that is no restart."""
    while at < len(data):
        found = _SCAN_END.search(data, at, at + _SEARCH_BYTES)
        if found:
            return found.start()
        at += _SEARCH_BYTES - 1  # a marker can lie on the border
    raise damaged("it ends early")


def _check_huffman(body: memoryview) -> None:
    at = 0
    while at < len(body):
        counts = body[at + 1 : at + 17]
        total = sum(counts)
        at += 17 + total
        if len(counts) != 16 or total > 256 or at > len(body):
            raise damaged("Huffman table")


def _check_quantization(body: memoryview) -> None:
    at = 0
    while at < len(body):
        at += 1 + (128 if body[at] >> 4 else 64)
    if at != len(body):
        raise damaged("quantization table")
