"""What a picture's file holds: the pixels, and the parameters only where they were asked for."""

from __future__ import annotations

import json
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from shared.job import Adapter, Job, OutputFormat
from worker.output.images import encode

PROMPT = 'a "red" circle — 🎨 on blue'
Pixels = np.ndarray
PICTURE_FORMATS = [one for one in OutputFormat if one is not OutputFormat.MP4]


def _job(output_format: OutputFormat, **changes: object) -> Job:
    values = {
        "id": "job_1",
        "tenant": "default",
        "created_at_ms": 0,
        "model": "demo",
        "width": 48,
        "height": 32,
        "prompt": PROMPT,
        "negative_prompt": "blurry",
        "seed": 2**62,
        "steps": 20,
        "guidance_scale": 5.5,
        "adapters": (Adapter(id="ink", scale=0.5),),
        "output_format": output_format,
    }
    return Job(**(values | changes))


def _pixels() -> Pixels:
    y, x = np.mgrid[0:32, 0:48]
    return np.stack([x * 5, y * 7, x + y], axis=-1).astype(np.uint8)


def _parameters_in(data: bytes) -> str | None:
    with Image.open(BytesIO(data)) as picture:
        picture.load()
        if picture.format == "PNG":
            return picture.info.get("parameters")
        comment = picture.getexif().get_ifd(0x8769).get(0x9286)
    if comment is None:
        return None
    assert comment.startswith(b"UNICODE\0")
    return comment[8:].decode("utf-16-be")


@pytest.mark.parametrize("output_format", PICTURE_FORMATS)
def test_the_file_is_of_its_format_and_holds_the_pixels(output_format: OutputFormat) -> None:
    """PNG gives the very pixels back; JPEG and WebP nearly, with rows and columns where they were."""
    pixels = _pixels()
    data, content_type = encode(pixels, _job(output_format, output_quality=95), 0)
    with Image.open(BytesIO(data)) as picture:
        assert Image.MIME[str(picture.format)] == content_type == output_format.content_type
        back = np.asarray(picture.convert("RGB")).astype(int)
    assert back.shape == pixels.shape
    distance = np.abs(back - pixels)
    assert distance.max() == 0 if output_format is OutputFormat.PNG else distance.mean() < 5


@pytest.mark.parametrize("output_format", PICTURE_FORMATS)
def test_parameters_read_back_when_they_were_asked_for(output_format: OutputFormat) -> None:
    """Any reader of metadata finds what makes the picture again, its own seed included."""
    data, _ = encode(_pixels(), _job(output_format, embed_parameters=True), 3)
    text = _parameters_in(data)
    assert text is not None
    assert json.loads(text) == {
        "prompt": PROMPT,
        "negative_prompt": "blurry",
        "seed": 2**62 + 3,
        "model": "demo",
        "adapters": [{"id": "ink", "scale": 0.5}],
        "width": 48,
        "height": 32,
        "steps": 20,
        "guidance_scale": 5.5,
    }


@pytest.mark.parametrize("output_format", PICTURE_FORMATS)
def test_nothing_of_the_job_is_in_the_file_otherwise(output_format: OutputFormat) -> None:
    """Without the wish the file tells nothing but its pixels."""
    data, _ = encode(_pixels(), _job(output_format, prompt="secret-words"), 0)
    assert _parameters_in(data) is None
    for word in (b"secret", "secret".encode("utf-16-be"), b"fusequeue", b"Exif", b"tEXt", b"iTXt"):
        assert word not in data


@pytest.mark.parametrize("output_format", PICTURE_FORMATS)
def test_the_longest_prompt_still_fits(output_format: OutputFormat) -> None:
    """EXIF has an end; a text that would pass it is cut and the picture is made."""
    job = _job(output_format, prompt="🎨" * 100_000, negative_prompt="🎨" * 100_000, embed_parameters=True)
    text = _parameters_in(encode(_pixels(), job, 0)[0])
    assert text is not None
    assert json.loads(text)["prompt"] == "🎨" * 7000


def test_quality_is_the_jobs() -> None:
    """A lower quality makes a smaller file."""
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for output_format in (OutputFormat.JPEG, OutputFormat.WEBP):
        small, large = (len(encode(noise, _job(output_format, output_quality=q), 0)[0]) for q in (20, 95))
        assert small < large / 2


def test_a_view_of_other_pixels_is_encoded_as_it_looks() -> None:
    """Pixels that are no block of memory (a flipped or strided view) come out right."""
    pixels = _pixels()[::-1, ::2]
    data, _ = encode(pixels, _job(OutputFormat.PNG), 0)
    assert np.array_equal(np.asarray(Image.open(BytesIO(data))), pixels)
