"""Input images: decoding, cropping and scaling of a job's files."""

from __future__ import annotations

import io
import queue
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from fuzz import hostile_images
from harness.engine import a_job, a_spec
from PIL import Image, ImageOps

from shared.errors import InferenceFailed, UnexpectedError
from shared.job import InputRef, Job, Task
from worker.engine.pipelines import input_decoder
from worker.engine.pipelines.input_decoder import DecodedInputs, InputDecoder
from worker.engine.pipelines.input_images import InputImages, decode_inputs, fit_image, fit_mask
from worker.engine.protocol import EngineRequest, InputFiles


def file_of(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def test_an_input_image_covers_the_size_and_is_cropped_to_the_centre() -> None:
    """A wide image loses its sides, equally."""
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste("blue", (100, 0, 200, 100))
    fitted = fit_image(file_of(wide), 50, 50)
    assert fitted.size == (50, 50)
    assert fitted.getpixel((25, 25)) == (0, 0, 255)
    assert fitted.getpixel((4, 25)) == (0, 0, 255)


@pytest.mark.parametrize(("deep", "grey"), [(0, 0), (255, 0), (32_896, 128), (65_535, 255)])
def test_16_bit_greys_keep_their_shade(deep: int, grey: int) -> None:
    """Pillow would clip all but the darkest values of a depth map to white."""
    data = file_of(Image.new("I;16", (8, 8), deep))
    assert fit_image(data, 8, 8).getpixel((4, 4)) == pytest.approx((grey,) * 3, abs=1)
    assert fit_mask(data, 8, 8).getpixel((4, 4)) == pytest.approx(grey, abs=1)


def test_an_input_image_becomes_upright_and_opaque() -> None:
    """The camera's orientation is applied, and transparent areas become white."""
    sideways = Image.new("RGB", (80, 40), "red")
    sideways.paste("blue", (0, 0, 40, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter, clockwise
    upright = fit_image(file_of(sideways, exif=exif), 40, 80)
    assert upright.getpixel((20, 10)) == (0, 0, 255)
    assert fit_image(file_of(Image.new("RGBA", (8, 8), (0, 0, 0, 0))), 8, 8).getpixel((4, 4)) == (255, 255, 255)


@pytest.mark.parametrize("data", [b"", b"no image", file_of(Image.new("RGB", (64, 64)))[:60]])
def test_an_image_that_cannot_be_decoded_is_an_error(data: bytes) -> None:
    """The error names the field."""
    with pytest.raises(InferenceFailed) as caught:
        fit_image(data, 8, 8)
    assert caught.value.param == "image"


def test_a_mask_is_cropped_like_its_image_and_white_is_repainted() -> None:
    """Transparent areas are repainted if a mask has any, as sent by OpenAI's clients."""
    wide = Image.new("L", (300, 100))
    wide.paste(255, (100, 0, 200, 100))
    mask = fit_mask(file_of(wide), 50, 50)
    assert (mask.mode, mask.size, mask.getpixel((25, 25))) == ("L", (50, 50), 255)
    assert fit_mask(file_of(wide), 150, 50).getpixel((10, 25)) == 0
    transparent = Image.new("RGBA", (64, 64), (255, 255, 255, 255))
    transparent.paste((0, 0, 0, 0), (0, 0, 32, 64))
    inverted = fit_mask(file_of(transparent), 64, 64)
    assert (inverted.getpixel((10, 30)), inverted.getpixel((50, 30))) == (255, 0)


def test_an_image_to_edit_keeps_its_proportions_and_with_layers_its_transparency() -> None:
    """It is scaled to the size in the signature, and not cropped."""
    halves = Image.new("RGBA", (300, 100), (255, 0, 0, 255))
    halves.paste((0, 0, 0, 0), (150, 0, 300, 100))
    job = a_job("x", task=Task.EDIT, reference_sizes=((96, 32), (64, 64)), image_count=2)
    wide, square = decode_inputs(job, InputFiles(images=(file_of(halves), file_of(halves)))).images
    assert (wide.size, square.size, wide.mode) == ((96, 32), (64, 64), "RGB")
    assert wide.getpixel((90, 16)) == (255, 255, 255)
    layered = a_job("x", task=Task.EDIT, reference_sizes=((96, 32),), layers=3)
    (clear,) = decode_inputs(layered, InputFiles(images=(file_of(halves),))).images
    assert clear.getpixel((90, 16)) == (0, 0, 0, 0)


@pytest.mark.parametrize("param", ["mask", "last_image"])
def test_the_error_names_the_input_that_cannot_be_decoded(param: str) -> None:
    """A job can have several inputs."""
    job = a_job("x", task=Task.IMAGE_TO_VIDEO)
    with pytest.raises(InferenceFailed) as caught:
        decode_inputs(job, InputFiles(images=(file_of(Image.new("RGB", (8, 8))),), **{param: b"broken"}))
    assert caught.value.param == param


@pytest.mark.parametrize("fault", [EOFError("no more"), struct.error("unpack"), KeyError("mode"), MemoryError()])
def test_any_error_of_an_image_reader_ends_its_job(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_image: Any) -> Any:
        raise fault

    monkeypatch.setattr(ImageOps, "exif_transpose", broken)
    with pytest.raises(InferenceFailed, match="cannot be decoded"):
        fit_image(file_of(Image.new("RGB", (8, 8))), 8, 8)


class DecoderHarness:
    """A decoder that holds the images of the tenants in `held` back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *held: str) -> None:
        self.held = {tenant: threading.Semaphore(0) for tenant in held}
        """Each release lets one decoding of the tenant go on."""
        self.results: queue.SimpleQueue[list[DecodedInputs]] = queue.SimpleQueue()
        self.started: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.canceled: set[str] = set()
        decode = input_decoder.decode_inputs

        def waiting(job: Job, files: InputFiles) -> InputImages:
            self.started.put(job.id)
            if job.tenant in self.held:
                assert self.held[job.tenant].acquire(timeout=30)
            return decode(job, files)

        monkeypatch.setattr(input_decoder, "decode_inputs", waiting)
        self.decoder = InputDecoder(self.results.put, lambda key: key not in self.canceled, 40_000_000)

    def submit(self, *names: str, side: int = 8, data: bytes | None = None) -> None:
        """Submit jobs, together; a name begins with its tenant."""
        ref = InputRef(id="in_1", key="k", content_type="image/png", bytes=1, width=side, height=side)
        numbered = []
        for arrival, name in enumerate(names):
            job = a_job(name, tenant=name.partition(" ")[0], strength=0.5, images=(ref,))
            files = InputFiles(images=(file_of(Image.new("RGB", (8, 8))) if data is None else data,))
            numbered.append((EngineRequest(name, job, a_spec(Path("tiny")), files), arrival))
        self.decoder.submit(numbered)

    def next(self) -> list[str]:
        return [decoded.request.claim_key for decoded in self.results.get(timeout=30)]


def test_large_images_of_one_tenant_do_not_hold_up_small_ones_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """39 megapixels take seconds to decode."""
    harness = DecoderHarness(monkeypatch, "greedy")
    harness.submit(*(f"greedy {index}" for index in range(20)), side=6000)
    harness.submit("modest 1", "modest 2")
    assert harness.next() == ["modest 1", "modest 2"]
    harness.submit("greedy small", "modest large", side=6000)
    started = [harness.started.get(timeout=30) for _ in range(4)]  # two large ones are decoded at a time
    for _ in range(3):
        harness.held["greedy"].release()
        started.append(harness.started.get(timeout=30))
    assert "modest large" in started
    harness.decoder.close()
    harness.held["greedy"].release(20)


def test_images_of_jobs_that_were_canceled_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = DecoderHarness(monkeypatch)
    harness.canceled.add("a canceled")
    harness.submit("a canceled", "a wanted")
    assert harness.next() == ["a canceled", "a wanted"]
    assert [harness.started.get(timeout=1), harness.started.empty()] == ["a wanted", True]
    harness.submit("a wanted")
    assert harness.results.get(timeout=30)[0].request.inputs == InputFiles()  # no file is kept
    harness.decoder.close()


@pytest.mark.parametrize(
    "data",
    [
        hostile_images.flat_png(8000, 6000),
        hostile_images.flat_webp(16_000, 16_000),
        file_of(Image.new("RGB", (8, 8)), "TIFF"),
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n",
        file_of(Image.new("RGB", (64, 64)))[:90],
    ],
)
def test_a_hostile_stored_object_fails_only_its_job_before_a_decoder_sees_it(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage can hold anything by accident. Pillow reads 40 formats, some of them with other programs."""
    harness = DecoderHarness(monkeypatch)
    harness.submit("a bad", data=data)
    harness.submit("b good")
    (bad,), (good,) = harness.results.get(timeout=30), harness.results.get(timeout=30)
    assert isinstance(bad.error, InferenceFailed)
    assert (bad.error.param, good.error) == ("image", None)
    assert good.images.images[0].size == (good.request.job.width, good.request.job.height)
    assert harness.started.get(timeout=1) == "b good"
    harness.decoder.close()


def test_metadata_of_a_stored_object_reach_no_decoder(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pillow logs each of 65,000 broken EXIF entries."""
    harness = DecoderHarness(monkeypatch)
    harness.submit("a", data=hostile_images.hostile("huge exif")["huge exif"])
    (decoded,) = harness.results.get(timeout=30)
    assert decoded.error is None
    assert caplog.records == []
    harness.decoder.close()


def test_an_unexpected_error_of_a_decoder_ends_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job without images or an error would never end."""

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(input_decoder, "inspect", fails)
    harness = DecoderHarness(monkeypatch)
    harness.submit("a job")
    (decoded,) = harness.results.get(timeout=30)
    assert isinstance(decoded.error, UnexpectedError)
    harness.decoder.close()
