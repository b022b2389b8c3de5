"""PNG: checks the order, the checksums and the headers of the chunks, and keeps those that decide pixels."""

import struct
import zlib

from shared.inputs.formats import MAX_SIDE, FormatFault, StrippedImage, damaged, exif, joined

SIGNATURE = b"\x89PNG\r\n\x1a\n"

_MAX_CHUNKS = 20_000  # encoders write at least 1 KiB into each
_FRAME_BYTES = 12  # length, name and checksum
_GREY, _RGB, _PALETTE = 0, 2, 3
_DEPTHS = {_GREY: (1, 2, 4, 8, 16), _RGB: (8, 16), _PALETTE: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_TRANSPARENCY_BYTES = {_GREY: 2, _RGB: 6}
_CRITICAL = 0x20  # this bit of a name's first letter is clear


class _Chunks:
    """What has been read of one file."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = [SIGNATURE]
        self.orientation = exif.UPRIGHT
        self.width = self.height = self.colour = 0
        self.palette = self.transparency = self.pixels = self.pixels_ended = self.ended = False

    def add(self, name: bytes, body: memoryview, whole: memoryview) -> None:
        """Check one chunk, and keep `whole` if it decides pixels."""
        if not self.width and name != b"IHDR":
            raise damaged("it does not begin with its header")
        self.pixels_ended |= self.pixels and name != b"IDAT"
        if self._is_kept(name, body):
            if zlib.crc32(whole[4:-4]) != struct.unpack(">I", whole[-4:])[0]:
                raise damaged(f"checksum of {name.decode('ascii')}")
            self.parts.append(whole)
        self.ended = name == b"IEND"

    def _is_kept(self, name: bytes, body: memoryview) -> bool:
        if name == b"IHDR":
            self._read_header(body)
        elif name == b"PLTE":
            return self._is_palette(body)
        elif name == b"tRNS":
            return self._is_transparency(body)
        elif name == b"IDAT":
            if self.pixels_ended or (self.colour == _PALETTE and not self.palette):
                raise damaged("its pixels are interrupted or have no palette")
            self.pixels = True
        elif name == b"acTL" and bytes(body[:4]) != b"\0\0\0\1":
            raise FormatFault("is animated; send a single frame")
        elif name == b"eXIf" and self.orientation == exif.UPRIGHT:
            self.orientation = exif.read_orientation(body)
        elif not name[0] & _CRITICAL and name != b"IEND":
            raise damaged(f"unknown chunk {bytes(name)!r}")
        return name in (b"IHDR", b"IDAT", b"IEND")

    def _read_header(self, body: memoryview) -> None:
        if self.width or len(body) != 13:
            raise damaged("header")
        self.width, self.height, depth, self.colour, compression, row_filter, interlace = struct.unpack(
            ">IIBBBBB", body
        )
        valid = depth in _DEPTHS.get(self.colour, ()) and (compression, row_filter) == (0, 0) and interlace in (0, 1)
        if not (valid and self.width and self.height):
            raise damaged("header")
        if max(self.width, self.height) > MAX_SIDE:
            raise FormatFault(f"has a side of more than {MAX_SIDE} pixels")

    def _is_palette(self, body: memoryview) -> bool:
        if self.colour != _PALETTE:
            return False  # only a suggestion for old screens
        if self.palette or self.pixels or len(body) % 3 or not 1 <= len(body) // 3 <= 256:
            raise damaged("palette")
        self.palette = True
        return True

    def _is_transparency(self, body: memoryview) -> bool:
        if self.colour != _PALETTE and self.colour not in _TRANSPARENCY_BYTES:
            return False  # the pixels have alpha
        right_size = len(body) == _TRANSPARENCY_BYTES.get(self.colour) or (self.colour == _PALETTE and len(body) <= 256)
        if self.transparency or self.pixels or not right_size:
            raise damaged("transparency")
        self.transparency = True
        return True


def strip(data: bytes) -> StrippedImage:
    """Return a PNG as its header, palette, transparency and pixels; raises `FormatFault`.

    Pixels are not inflated: their checksums show damage, and the header has their number.
    """
    chunks, view, at = _Chunks(), memoryview(data), len(SIGNATURE)
    for _ in range(_MAX_CHUNKS):
        if at + _FRAME_BYTES > len(data):
            raise damaged("it ends early")
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + _FRAME_BYTES + length
        if end > len(data) or not name.isalpha():
            raise damaged("it ends early")
        chunks.add(name, view[at + 8 : end - 4], view[at:end])
        if chunks.ended:
            break
        at = end
    if not (chunks.ended and chunks.pixels):
        raise damaged("it has too many chunks, or no pixels")
    if chunks.orientation != exif.UPRIGHT:
        chunks.parts.insert(2, _chunk(b"eXIf", exif.orientation_block(chunks.orientation)))
    return StrippedImage(chunks.width, chunks.height, chunks.orientation, joined(chunks.parts, data))


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
