"""Validation of input image files."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fuzz import hostile_images, images
from fuzz.hostile_images import SECRET, noise, png_chunk, saved, webp, webp_chunk, with_metadata
from PIL import Image, ImageOps

from shared.errors import InputRejected
from shared.inputs.validation import inspect

LIMITS: dict[str, Any] = {"max_bytes": 1_000_000, "max_pixels": 1_000_000}
LARGE: dict[str, Any] = {"max_bytes": 20_000_000, "max_pixels": 40_000_000}
KINDS = ("PNG", "JPEG", "WEBP")
ROOT = Path(__file__).resolve().parents[3]

FILES = images.corpus()


def pixels(data: bytes) -> tuple[str, tuple[int, int], bytes]:
    """Return what a model sees of a file."""
    with Image.open(BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
        shown = upright.convert("RGBA") if upright.has_transparency_data else upright
        return shown.mode, shown.size, shown.tobytes()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_metadata_are_dropped_and_pixels_stay_the_same(name: str, orientation: int) -> None:
    """Places, comments, profiles and bytes after the end are gone; the image stays upright."""
    data = with_metadata(FILES[name], orientation)
    assert SECRET in data
    image = inspect(data, **LIMITS)
    assert SECRET not in image.data
    assert pixels(image.data) == pixels(data)
    assert pixels(image.data)[1] == (image.width, image.height)
    assert len(image.data) <= len(FILES[name]) + 64
    assert inspect(image.data, **LIMITS) == image


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_metadata_is_kept_as_it_is(kind: str) -> None:
    data = saved(noise(), kind)
    image = inspect(data, **LIMITS)
    assert (image.content_type, image.width, image.height) == (f"image/{kind.lower()}", 40, 30)
    assert image.data == data


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("orientation", "size"), [(1, (40, 30)), (3, (40, 30)), (6, (30, 40)), (8, (30, 40))])
def test_size_includes_the_exif_orientation(kind: str, orientation: int, size: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = inspect(saved(noise(), kind, exif=exif), **LIMITS)
    assert (image.width, image.height) == size
    assert pixels(image.data)[1] == size


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_file_is_rejected(kind: str) -> None:
    data = saved(noise(), kind)
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
        (b"\0\0\0\x1cftypavif" + bytes(50), "HEIC or AVIF"),
        (b"%PDF-1.7", "a PDF"),
        (b"RIFF\0\0\0\0AVI fmt ", "unsupported image"),
        (b"RIFF\0\0\0\0WAVEfmt ", "WAV file is damaged"),
    ],
)
def test_other_file_types_are_rejected_by_name(data: bytes, words: str) -> None:
    with pytest.raises(InputRejected, match=words) as refused:
        inspect(data, **LIMITS, param="file")
    assert refused.value.param == "file"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (hostile_images.png(2**31 - 1, 2**31 - 1, b""), "a side of more than 65535 pixels"),
        (hostile_images.png(50_000, 50_000, b""), "at most 1000000 are allowed"),
        (hostile_images.png(1001, 1000, b""), "1001x1000 pixels; at most 1000000 are allowed"),
        (hostile_images.flat_webp(16_000, 16_000), "at most 1000000 are allowed"),
        (webp(webp_chunk(b"VP8X", bytes(4) + b"\xff\xff\x3f\xff\xff\x3f"), webp_chunk(b"VP8L", bytes(9))), "damaged"),
    ],
)
def test_decompression_bomb_is_rejected(data: bytes, words: str) -> None:
    with pytest.raises(InputRejected, match=words):
        inspect(data, **LIMITS)


def test_jpeg_bomb_is_rejected() -> None:
    data = bytearray(saved(noise(), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", 60_000, 60_000)
    with pytest.raises(InputRejected, match="60000x60000 pixels; at most 1000000 are allowed"):
        inspect(bytes(data), **LIMITS)


@pytest.mark.parametrize("name", ["webp of 40 megapixels", "deep png with alpha", "progressive jpeg of 40 megapixels"])
def test_validation_takes_little_memory_and_time_whatever_the_number_of_pixels(name: str, tmp_path: Path) -> None:
    """Files of some hundred kilobytes, which take up to 700 MB to decode."""
    file = tmp_path / "file"
    file.write_bytes(hostile_images.hostile(name)[name])
    code = f"""
import resource, sys, time
from shared.inputs.validation import inspect
data = open({str(file)!r}, "rb").read()
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
image = inspect(data, max_bytes=20_000_000, max_pixels=40_000_000)
assert image.width * image.height > 38_000_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, time.process_time() - start)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    kilobytes, seconds = map(float, run.stdout.split())
    assert kilobytes < 8_000
    assert seconds < 0.5


@pytest.mark.parametrize("name", ["huge exif", "text bomb", "many chunks"])
def test_hostile_metadata_cost_nothing_and_are_dropped(name: str, caplog: pytest.LogCaptureFixture) -> None:
    data = hostile_images.hostile(name)[name]
    started = time.process_time()
    image = inspect(data, **LARGE)
    assert time.process_time() - started < 0.5
    assert len(image.data) < 200_000
    assert caplog.records == []


def test_orientation_is_found_among_thousands_of_broken_exif_entries(caplog: pytest.LogCaptureFixture) -> None:
    image = inspect(hostile_images.hostile("huge exif")["huge exif"], **LIMITS)
    assert (image.width, image.height) == (30, 40)
    assert caplog.records == []


def test_jpeg_with_too_many_scans_is_rejected() -> None:
    """A few bytes per scan would cost minutes of CPU."""
    data = saved(noise(), "JPEG", progressive=True)
    begin = data.index(b"\xff\xda")
    scan = data[begin : data.index(b"\xff", begin + 20)]
    with pytest.raises(InputRejected, match="scans"):
        inspect(data[:begin] + scan * 100 + data[begin:], **LIMITS)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_animation_is_rejected(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    data = saved(noise(8, 8), kind, save_all=True, append_images=frames, duration=50)
    with pytest.raises(InputRejected, match="animated"):
        inspect(data, **LIMITS)


@pytest.mark.parametrize(
    "data",
    [
        FILES["png RGB"][:33] + png_chunk(b"CgBI", b"") + FILES["png RGB"][33:],
        FILES["png RGB"].replace(b"IDAT", b"IDAU"),
        FILES["png P"].replace(b"PLTE", b"pLTE"),
        FILES["png RGB"][:33] + FILES["png RGB"][8:],
        FILES["png RGB"][:33] + png_chunk(b"tRNS", bytes(5)) + FILES["png RGB"][33:],
        FILES["png RGB"][:60] + bytes([FILES["png RGB"][60] ^ 1]) + FILES["png RGB"][61:],
        hostile_images.png(8, 8, b"", depth=3),
        FILES["jpeg RGB"].replace(b"\xff\xc0", b"\xff\xc9"),
        FILES["jpeg RGB"].replace(b"\xff\xda", b"\xff\xd9"),
        FILES["jpeg RGB"][:2] + b"\xff\xf7\0\2" + FILES["jpeg RGB"][2:],
        webp(webp_chunk(b"EXIF", bytes(20))),
        webp(*[webp_chunk(b"VP8L", FILES["webp lossless"][20:])] * 2),
        webp(webp_chunk(b"VP8X", bytes(10)), *[webp_chunk(b"x", b"")] * 2000),
    ],
)
def test_file_that_breaks_the_rules_of_its_format_is_rejected(data: bytes) -> None:
    with pytest.raises(InputRejected):
        inspect(data, **LIMITS)


def test_too_large_file_is_rejected() -> None:
    with pytest.raises(InputRejected, match="image: 11 bytes; at most 10"):
        inspect(b"\x89PNG\r\n\x1a\n123", max_bytes=10, max_pixels=100)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_file_is_accepted_or_rejected(kind: str) -> None:
    """Random damage raises no other error."""
    chance = random.Random(7)
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = saved(noise(), kind, exif=exif, icc_profile=b"profile" * 40)
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


def test_mutated_files_are_rejected_or_keep_their_pixels() -> None:
    """A short form of `make fuzz PARTS=images`."""
    report = images.run(seed=1, seconds=1, least=200)
    assert report["problems"] == []
    assert min(report["accepted"], report["rejected"]) > 20
