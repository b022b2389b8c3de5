"""WebP: checks the sizes of its chunks, and keeps the image, its transparency and the orientation."""

import struct

from shared.inputs.formats import FormatFault, StrippedImage, damaged, exif, joined

_MAX_CHUNKS = 1000
_ALPHA, _EXIF, _ANIMATION = 0x10, 0x08, 0x02  # flags of VP8X
_LOSSY, _LOSSLESS, _EXTENDED = b"VP8 ", b"VP8L", b"VP8X"


def strip(data: bytes) -> StrippedImage:
    """Return a WebP as its image data; raises `FormatFault`. Pixels are not decoded, and have no checksum."""
    view = memoryview(data)
    (size,) = struct.unpack_from("<I", data, 4) if len(data) >= 12 else (0,)
    end = 8 + size
    if end > len(data) or size < 12:
        raise damaged("it ends early")
    chunks = _chunks(view[12:end])
    first = next(iter(chunks), b"")
    if first not in (_LOSSY, _LOSSLESS, _EXTENDED):
        raise damaged("it does not begin with an image")
    kind = first if first != _EXTENDED else next((name for name in (_LOSSY, _LOSSLESS) if name in chunks), b"")
    flags, canvas = _extended_header(chunks[_EXTENDED]) if first == _EXTENDED else (0, None)
    if kind not in chunks:
        raise damaged("it has no image")
    width, height = _lossy_size(chunks[kind]) if kind == _LOSSY else _lossless_size(chunks[kind])
    if not (width and height) or canvas not in (None, (width, height)):
        raise damaged("the size of its image")
    orientation = exif.read_orientation(chunks.get(b"EXIF", b"")) if first == _EXTENDED else exif.UPRIGHT
    parts: list[bytes | memoryview] = []
    if first == _EXTENDED:
        kept = (flags & _ALPHA) | (_EXIF if orientation != exif.UPRIGHT else 0)
        sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        parts += _chunk(_EXTENDED, bytes((kept, 0, 0, 0)) + sides)
        names = list(chunks)
        if kind == _LOSSY and b"ALPH" in names[: names.index(kind)]:  # decoders use it whatever the flag says
            parts += _chunk(b"ALPH", chunks[b"ALPH"])
    parts += _chunk(kind, chunks[kind])
    if orientation != exif.UPRIGHT:
        parts += _chunk(b"EXIF", exif.orientation_block(orientation))
    head = struct.pack("<4sI4s", b"RIFF", 4 + sum(map(len, parts)), b"WEBP")
    return StrippedImage(width, height, orientation, joined([head, *parts], data))


def _chunks(body: memoryview) -> dict[bytes, memoryview]:
    """Return the first chunk of each name, in order; raises `FormatFault` for an animation or a second image."""
    chunks: dict[bytes, memoryview] = {}
    at = 0
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(body):
            return chunks
        name, size = struct.unpack_from("<4sI", body, at)
        payload = body[at + 8 : at + 8 + size]
        if len(payload) != size:
            raise damaged("it ends early")
        if name in (b"ANIM", b"ANMF"):
            raise FormatFault("is animated; send a single frame")
        if name in (_LOSSY, _LOSSLESS) and (_LOSSY in chunks or _LOSSLESS in chunks):
            raise damaged("it has several images")
        chunks.setdefault(name, payload)
        at += 8 + size + size % 2
    raise damaged("it has too many chunks")


def _extended_header(header: memoryview) -> tuple[int, tuple[int, int]]:
    if len(header) < 10:
        raise damaged("header")
    if header[0] & _ANIMATION:
        raise FormatFault("is animated; send a single frame")
    return header[0], (int.from_bytes(header[4:7], "little") + 1, int.from_bytes(header[7:10], "little") + 1)


def _lossy_size(image: memoryview) -> tuple[int, int]:
    """Return the size in the header of a key frame."""
    if len(image) < 10 or image[0] & 1 or bytes(image[3:6]) != b"\x9d\x01\x2a":
        raise damaged("image header")
    first_partition = int.from_bytes(image[:3], "little") >> 5
    if 10 + first_partition > len(image):
        raise damaged("it ends early")
    width, height = struct.unpack_from("<HH", image, 6)
    return width & 0x3FFF, height & 0x3FFF


def _lossless_size(image: memoryview) -> tuple[int, int]:
    if len(image) < 5 or image[0] != 0x2F:
        raise damaged("image header")
    bits = int.from_bytes(image[1:5], "little")
    if bits >> 29:
        raise damaged("image header")
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1


def _chunk(name: bytes, payload: bytes | memoryview) -> list[bytes | memoryview]:
    return [struct.pack("<4sI", name, len(payload)), payload, b"\0" * (len(payload) % 2)]
