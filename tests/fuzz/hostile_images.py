"""Image files that cost much to decode, or hide something: made by hand, a few bytes each."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image

SECRET = b"GPS 52.5163 N 13.3777 E"
"""What hostile metadata of these files contain."""


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Return `image` as a file of Pillow."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    """Return an image of which no row is like another."""
    grey = Image.effect_noise((width, height), 60)
    if mode == "RGBA":
        return Image.merge("RGBA", (grey, grey.rotate(180), grey, grey.rotate(180)))
    return grey.convert(mode)


def exif(orientation: int = 1, entries: int = 0) -> bytes:
    """Return an EXIF block, with the secret in a text and `entries` more that are broken."""
    rows = [struct.pack("<HHII", 0x010E, 2, len(SECRET), 8 + 2 + 12 * (entries + 2) + 4)]
    rows.append(struct.pack("<HHIHH", 0x0112, 3, 1, orientation, 0))
    rows += [struct.pack("<HHII", 0x9000 + index % 9, 7, 0xFFFFFF, 0xFFFFFF) for index in range(entries)]
    return b"II*\0" + struct.pack("<IH", 8, len(rows)) + b"".join(rows) + bytes(4) + SECRET


def png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(  # noqa: PLR0913 - the fields of its header
    width: int,
    height: int,
    pixels: bytes,
    *,
    colour: int = 2,
    depth: int = 8,
    interlaced: bool = False,
    more: bytes = b"",
) -> bytes:
    """Return a PNG of compressed `pixels`, with the chunks `more` before them."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, int(interlaced)))
    return b"\x89PNG\r\n\x1a\n" + header + more + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")


def flat_png(width: int, height: int, *, colour: int = 2, depth: int = 8, interlaced: bool = False) -> bytes:
    """Return a black PNG that inflates a thousandfold."""
    bits = depth * {0: 1, 2: 3, 4: 2, 6: 4}[colour]
    passes = [(0, 0, 1, 1)]
    if interlaced:
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    packer = zlib.compressobj(9)
    packed = []
    for left, top, across, down in passes:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            row = bytes(1 + (columns * bits + 7) // 8)
            step = max(1, 1_000_000 // len(row))
            for start in range(0, rows, step):
                packed.append(packer.compress(row * min(step, rows - start)))
    packed.append(packer.flush())
    return png(width, height, b"".join(packed), colour=colour, depth=depth, interlaced=interlaced)


def flat_webp(width: int, height: int) -> bytes:
    """Return a lossless WebP of one colour: no bit for any pixel, 16 bytes of memory for each."""
    bits = [0, 0, 0]  # no transform, no colour cache, no meta codes
    for symbol in (7, 7, 7, 255, 0):  # green, red, blue, alpha, distance: codes of one symbol of eight bits
        bits += [1, 0, 1, *(symbol >> shift & 1 for shift in range(8))]
    stream = bytes(sum(bit << at for at, bit in enumerate(bits[start : start + 8])) for start in range(0, len(bits), 8))
    head = b"\x2f" + ((width - 1) | (height - 1) << 14).to_bytes(4, "little")
    return webp(webp_chunk(b"VP8L", head + stream + bytes(8)))


def webp_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack("<4sI", name, len(body)) + body + b"\0" * (len(body) % 2)


def webp(*chunks: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 4 + sum(map(len, chunks))) + b"WEBP" + b"".join(chunks)


def jpeg_segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(body)) + body


def with_metadata(data: bytes, orientation: int = 1) -> bytes:
    """Return a file of Pillow with the secret in every place that its format has for metadata, and after its end."""
    block = exif(orientation)
    if data.startswith(b"\x89PNG"):
        chunks = [png_chunk(b"eXIf", block), png_chunk(b"tEXt", b"Comment\0" + SECRET)]
        chunks += [png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(SECRET)), png_chunk(b"prVt", SECRET)]
        chunks.append(png_chunk(b"iCCP", b"name\0\0" + zlib.compress(SECRET)))
        return data[:33] + b"".join(chunks) + data[33:] + SECRET
    if data.startswith(b"\xff\xd8"):
        segments = [
            jpeg_segment(0xE1, b"Exif\0\0" + block),
            jpeg_segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + SECRET),
        ]
        segments += [jpeg_segment(0xE2, b"ICC_PROFILE\0\1\1" + SECRET), jpeg_segment(0xED, SECRET)]
        segments += [jpeg_segment(0xFE, SECRET), jpeg_segment(0xE0, b"JFXX\0\x10" + SECRET)]
        return data[:2] + b"".join(segments) + data[2:] + SECRET
    image = Image.open(io.BytesIO(data))
    body = data[12:] if data[12:16] != b"VP8X" else data[30:]
    sides = (image.width - 1).to_bytes(3, "little") + (image.height - 1).to_bytes(3, "little")
    head = webp_chunk(b"VP8X", bytes((0x2C | 0x10 * (image.mode == "RGBA"), 0, 0, 0)) + sides)
    chunks = [head, webp_chunk(b"ICCP", SECRET), body, webp_chunk(b"EXIF", block), webp_chunk(b"XMP ", SECRET)]
    return webp(*chunks, webp_chunk(b"priv", SECRET)) + SECRET


def _small(chunks: bytes) -> bytes:
    data = saved(noise(), "PNG")
    return data[:33] + chunks + data[33:]


_HOSTILE: dict[str, Callable[[], bytes]] = {
    "webp of 40 megapixels": lambda: flat_webp(7000, 5700),
    "png of 39 megapixels": lambda: flat_png(6500, 6000),
    "deep png with alpha": lambda: flat_png(6500, 6000, colour=6, depth=16),
    "interlaced png": lambda: flat_png(6500, 6000, interlaced=True),
    "strip": lambda: flat_png(1, 60_000),
    "progressive jpeg of 40 megapixels": lambda: saved(
        Image.new("RGB", (7000, 5700)), "JPEG", progressive=True, subsampling=0
    ),
    "cmyk jpeg": lambda: saved(Image.new("CMYK", (3000, 3000)), "JPEG", progressive=True),
    "huge exif": lambda: _small(png_chunk(b"eXIf", exif(6, 65_000))),
    "text bomb": lambda: _small(png_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(100_000_000), 9))),
    "many chunks": lambda: _small(png_chunk(b"tEXt", b"") * 19_000),
}


def hostile(*names: str) -> dict[str, bytes]:
    """Return files of up to 40 megapixels by name, by default all: valid, and as expensive as their format allows."""
    return {name: _HOSTILE[name]() for name in names or _HOSTILE}
