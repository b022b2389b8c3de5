"""Validation of input image files."""

from __future__ import annotations

import random
import struct
import zlib
from io import BytesIO

import pytest
from PIL import Image

from shared.errors import InputRejected
from shared.inputs.validation import ImageInfo, inspect

LIMITS = {"max_bytes": 1_000_000, "max_pixels": 1_000_000}


def _saved(kind: str, size: tuple[int, int] = (40, 30), mode: str = "RGB", **options: object) -> bytes:
    out = BytesIO()
    Image.effect_noise(size, 60).convert(mode).save(out, kind, **options)
    return out.getvalue()


def _png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _png_declaring(width: int, height: int, pixels: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _png_chunk(b"IHDR", header) + _png_chunk(b"IDAT", zlib.compress(pixels))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_type_is_detected_from_the_content(kind: str) -> None:
    assert inspect(_saved(kind), **LIMITS) == ImageInfo(f"image/{kind.lower()}", 40, 30)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_all_png_modes_are_accepted(mode: str) -> None:
    """Palettes, alpha and 16 bits included."""
    out = BytesIO()
    Image.new(mode, (8, 9)).save(out, "PNG")
    assert inspect(out.getvalue(), **LIMITS).height == 9


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(("orientation", "size"), [(1, (40, 30)), (3, (40, 30)), (6, (30, 40)), (8, (30, 40))])
def test_size_includes_the_exif_orientation(kind: str, orientation: int, size: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    info = inspect(_saved(kind, exif=exif), **LIMITS)
    assert (info.width, info.height) == size


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_trailing_bytes_are_ignored(kind: str) -> None:
    assert inspect(_saved(kind) + b"junk" * 100, **LIMITS).width == 40


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_truncated_file_is_rejected(kind: str) -> None:
    data = _saved(kind)
    for size in [*range(1, 64, 7), len(data) // 2, len(data) * 9 // 10]:
        with pytest.raises(InputRejected):
            inspect(data[:size], **LIMITS)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"hello", "unsupported image; send a PNG, JPEG or WebP"),
        (b"GIF89a" + bytes(50), "unsupported image: a GIF"),
        (b"  <svg xmlns=''/>", "unsupported image: text or SVG"),
        (b"\0\0\0\x1cftypavif" + bytes(50), "HEIC, AVIF or a video"),
        (b"%PDF-1.7", "a PDF"),
        (b"RIFF\0\0\0\0WAVEfmt ", "unsupported image"),
    ],
)
def test_other_file_types_are_rejected_by_name(data: bytes, words: str) -> None:
    with pytest.raises(InputRejected, match=words) as refused:
        inspect(data, **LIMITS, param="file")
    assert refused.value.param == "file"


@pytest.mark.parametrize(
    "data",
    [
        _png_declaring(2**31 - 1, 2**31 - 1),
        _png_declaring(50_000, 50_000, bytes(1_000_000)),
        _png_declaring(1001, 1000),
        b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\xff\x3f\xff\xff\x3f" + bytes(8),
        b"RIFF\x1e\0\0\0WEBPVP8L\x0a\0\0\0\x2f\xff\xff\xff\xff" + bytes(8),
    ],
)
def test_decompression_bomb_is_rejected_by_its_header(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder is never called."""

    def decode(*_: object, **__: object) -> None:
        raise AssertionError("the bomb was opened")

    monkeypatch.setattr(Image, "open", decode)
    with pytest.raises(InputRejected, match="at most 1000000 are allowed"):
        inspect(data, **LIMITS)


def test_jpeg_bomb_is_rejected_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(_saved("JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", 60_000, 60_000)

    def decode(*_: object) -> None:
        raise AssertionError("the bomb was decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decode)
    with pytest.raises(InputRejected, match="pixels"):
        inspect(bytes(data), **LIMITS)


def test_jpeg_with_too_many_scans_is_rejected() -> None:
    """A few bytes per scan would cost minutes of CPU."""
    data = _saved("JPEG", progressive=True)
    begin = data.index(b"\xff\xda")
    scan = data[begin : data.index(b"\xff", begin + 20)]
    with pytest.raises(InputRejected, match="scans"):
        inspect(data[:begin] + scan * 100 + data[begin:], **LIMITS)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animation_is_rejected(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    data = _saved(kind, size=(8, 8), save_all=True, append_images=frames, duration=50)
    with pytest.raises(InputRejected, match="animated"):
        inspect(data, **LIMITS)


def test_compressed_metadata_bomb_is_rejected() -> None:
    data = _saved("PNG")
    bomb = _png_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(100_000_000), 9))
    with pytest.raises(InputRejected, match="damaged"):
        inspect(data[:33] + bomb + data[33:], **LIMITS)


def test_too_large_file_is_rejected_before_decoding() -> None:
    with pytest.raises(InputRejected, match="has 11 bytes; at most 10"):
        inspect(b"\x89PNG\r\n\x1a\n123", max_bytes=10, max_pixels=100)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_damaged_file_is_accepted_or_rejected(kind: str) -> None:
    """Random damage raises no other error."""
    chance = random.Random(7)
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = _saved(kind, exif=exif, icc_profile=b"profile" * 40)
    refused = 0
    for _ in range(800):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data) if chance.random() < 0.3 else 200)] = chance.randrange(256)
        try:
            inspect(bytes(data), **LIMITS)
        except InputRejected:
            refused += 1
    assert refused > 50
