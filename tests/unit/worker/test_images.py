"""Image files: pixels, and job parameters only on request."""

from __future__ import annotations

import json
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from shared.config.adapters import Adapter
from shared.job import Job
from shared.tasks import OutputFormat
from worker.output.image_encoding import encode

PROMPT = 'a "red" circle — 🎨 on blue'
Pixels = np.ndarray
IMAGE_FORMATS = [one for one in OutputFormat if one.content_type.startswith("image/")]


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
    with Image.open(BytesIO(data)) as image:
        image.load()
        if image.format == "PNG":
            return image.info.get("parameters")
        comment = image.getexif().get_ifd(0x8769).get(0x9286)
    if comment is None:
        return None
    assert comment.startswith(b"UNICODE\0")
    return comment[8:].decode("utf-16-be")


@pytest.mark.parametrize("output_format", IMAGE_FORMATS)
def test_file_has_its_format_and_pixels(output_format: OutputFormat) -> None:
    """PNG is lossless; JPEG and WebP nearly so, with rows and columns in order."""
    pixels = _pixels()
    data = encode(pixels, _job(output_format, output_quality=95), 0)
    with Image.open(BytesIO(data)) as image:
        assert Image.MIME[str(image.format)] == output_format.content_type
        back = np.asarray(image.convert("RGB")).astype(int)
    assert back.shape == pixels.shape
    distance = np.abs(back - pixels)
    assert distance.max() == 0 if output_format is OutputFormat.PNG else distance.mean() < 5


@pytest.mark.parametrize("output_format", IMAGE_FORMATS)
def test_embedded_parameters_are_read_back(output_format: OutputFormat) -> None:
    """Any metadata reader finds what reproduces the image, including its own seed."""
    data = encode(_pixels(), _job(output_format, embed_parameters=True), 3)
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


@pytest.mark.parametrize("output_format", IMAGE_FORMATS)
def test_file_without_parameters_contains_nothing_of_the_job(output_format: OutputFormat) -> None:
    data = encode(_pixels(), _job(output_format, prompt="secret-words"), 0)
    assert _parameters_in(data) is None
    for word in (b"secret", "secret".encode("utf-16-be"), b"fusequeue", b"Exif", b"tEXt", b"iTXt"):
        assert word not in data


@pytest.mark.parametrize("output_format", IMAGE_FORMATS)
def test_longest_prompt_fits(output_format: OutputFormat) -> None:
    """EXIF is limited: longer texts are cut."""
    longest = "🎨" * 100_000
    job = _job(output_format, prompt=longest, negative_prompt=longest, embed_parameters=True)
    for number, changes in ((7000, {}), (4666, {"prompt_2": longest})):
        text = _parameters_in(encode(_pixels(), job.model_copy(update=changes), 0))
        assert text is not None
        parameters = json.loads(text)
        assert {parameters[name] for name in ("prompt", "negative_prompt", *changes)} == {"🎨" * number}


@pytest.mark.parametrize("output_format", IMAGE_FORMATS)
@pytest.mark.parametrize("character", ["\x01", '"', "\n", "a", "—"])
def test_texts_are_cut_by_the_bytes_that_they_take(output_format: OutputFormat, character: str) -> None:
    """JSON escapes some characters, a control character as six."""
    text = character * 100_000
    data = encode(_pixels(), _job(output_format, prompt=text, negative_prompt=text, embed_parameters=True), 0)
    embedded = _parameters_in(data)
    assert embedded is not None
    parameters = json.loads(embedded)
    for name in ("prompt", "negative_prompt"):
        size = len(json.dumps(parameters[name], ensure_ascii=False)[1:-1].encode("utf-16-be"))
        assert 28_000 - 6 * 2 < size <= 28_000
        assert text.startswith(parameters[name])


def test_lower_quality_makes_smaller_files() -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for output_format in (OutputFormat.JPEG, OutputFormat.WEBP):
        small, large = (len(encode(noise, _job(output_format, output_quality=q), 0)) for q in (20, 95))
        assert small < large / 2


def test_non_contiguous_pixels_are_encoded_correctly() -> None:
    """A flipped or strided view of other pixels."""
    pixels = _pixels()[::-1, ::2]
    data = encode(pixels, _job(OutputFormat.PNG), 0)
    assert np.array_equal(np.asarray(Image.open(BytesIO(data))), pixels)
