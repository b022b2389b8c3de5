"""Input images: decoding, cropping and scaling of a job's files."""

from __future__ import annotations

import io
import queue
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
from diffusers import FluxControlPipeline
from fuzz import hostile_images
from harness.engine import a_job, a_spec
from harness.videos import a_video_file
from PIL import Image, ImageOps

from shared.errors import InferenceFailed, UnexpectedError, UnusableInput
from shared.inputs.validation import inspect
from shared.job import InputRef, Job
from shared.tasks import Task
from worker.engine.pipelines import input_decoder
from worker.engine.pipelines.call_arguments import arguments_for
from worker.engine.pipelines.input_decoder import DecodedInputs, InputDecoder
from worker.engine.pipelines.input_images import InputImages, decode_inputs, fit_image, fit_mask
from worker.engine.protocol import EngineRequest, InputFiles
from worker.engine.scheduling.engine_job import EngineJob


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


def test_a_mask_is_cropped_like_its_image() -> None:
    wide = Image.new("L", (300, 100))
    wide.paste(255, (100, 0, 200, 100))
    mask = fit_mask(file_of(wide), 50, 50)
    assert (mask.mode, mask.size, mask.getpixel((25, 25))) == ("L", (50, 50), 255)
    assert fit_mask(file_of(wide), 150, 50).getpixel((10, 25)) == 0


def halves(mode: str, left: Any, right: Any) -> Image.Image:
    """Return an image of two colours."""
    image = Image.new(mode, (64, 64), left)
    image.paste(right, (32, 0, 64, 64))
    return image


def palette(left: int, right: int) -> Image.Image:
    """Return a left half of palette entry 0, with the grey level `left`, and a right half of entry 1."""
    image = halves("P", 0, 1)
    image.putpalette([left] * 3 + [right] * 3)
    return image


def deep_png(depth: int, colour_type: int, left: int, right: int, key: int | None = None) -> bytes:
    """Return a PNG of two samples with `depth` bits, 8 pixels wide; `key` is the transparent one."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    samples = {0: 1, 2: 3}[colour_type]
    bits = "".join(f"{value:0{depth}b}" * samples for value in [left] * 4 + [right] * 4)
    row = b"\0" + int(bits, 2).to_bytes(len(bits) // 8)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, depth, colour_type, 0, 0, 0))
    transparent = b"" if key is None else chunk(b"tRNS", struct.pack(">H", key) * samples)
    return b"\x89PNG\r\n\x1a\n" + header + transparent + chunk(b"IDAT", zlib.compress(row * 8)) + chunk(b"IEND", b"")


BLACK, WHITE, CLEAR, FAINT = (0, 0, 0, 255), (255, 255, 255, 255), (0, 0, 0, 0), (0, 0, 0, 200)
MASKS = {
    "opaque RGBA, as canvases export": (file_of(halves("RGBA", BLACK, WHITE)), "right"),
    "opaque LA": (file_of(halves("LA", (0, 255), (255, 255))), "right"),
    "opaque WebP with alpha": (file_of(halves("RGBA", BLACK, WHITE), "WEBP", lossless=True, exact=True), "right"),
    "opaque palette with tRNS": (file_of(palette(0, 255), transparency=b"\xff\xff"), "right"),
    "L": (file_of(halves("L", 0, 255)), "right"),
    "RGB": (file_of(halves("RGB", "white", "black")), "left"),
    "JPEG": (file_of(halves("RGB", "black", "white"), "JPEG"), "right"),
    "grey JPEG": (file_of(halves("L", 255, 0), "JPEG"), "left"),
    "CMYK JPEG": (file_of(halves("RGB", "black", "white").convert("CMYK"), "JPEG"), "right"),
    "WebP": (file_of(halves("RGB", "black", "white"), "WEBP"), "right"),
    "palette": (file_of(palette(255, 0)), "left"),
    "1 bit": (file_of(halves("1", 0, 1)), "right"),
    "16 bits": (deep_png(16, 0, 0, 65_535), "right"),
    "RGB of 16 bits": (deep_png(16, 2, 65_535, 0), "left"),
    "transparent RGBA": (file_of(halves("RGBA", CLEAR, BLACK)), "left"),
    "white strokes on a transparent ground": (file_of(halves("RGBA", WHITE, CLEAR)), "right"),
    "transparent LA": (file_of(halves("LA", (255, 255), (255, 0))), "right"),
    "transparent WebP": (file_of(halves("RGBA", CLEAR, WHITE), "WEBP", lossless=True), "left"),
    "transparent palette entry": (file_of(palette(0, 255), transparency=0), "left"),
    "palette with tRNS": (file_of(palette(0, 255), transparency=b"\x00\xff"), "left"),
    "L with tRNS": (file_of(halves("L", 0, 255), transparency=0), "left"),
    "L with tRNS of a level it has not": (file_of(halves("L", 0, 255), transparency=7), "right"),
    "RGB with tRNS": (file_of(halves("RGB", "black", "white"), transparency=(0, 0, 0)), "left"),
    "1 bit with tRNS": (deep_png(1, 0, 0, 1, key=0), "left"),
    "2 bits with tRNS": (deep_png(2, 0, 1, 2, key=1), "left"),
    "4 bits with tRNS": (deep_png(4, 0, 2, 14, key=2), "left"),
    "16 bits with tRNS": (deep_png(16, 0, 500, 65_535, key=500), "left"),
    "RGB of 16 bits with tRNS": (deep_png(16, 2, 500, 65_535, key=500), "left"),
    "RGB of 16 bits with another tRNS": (deep_png(16, 2, 0x1200, 65_535, key=0x1200), "left"),
    "RGB of 16 bits with a tRNS of one level": (deep_png(16, 2, 0x0100, 65_535, key=0x0100), "left"),
    "RGB of 16 bits with a tRNS of half": (deep_png(16, 2, 0x8000, 0, key=0x8000), "left"),
    "nearly opaque, white beside black": (file_of(halves("RGBA", FAINT, WHITE)), "right"),
    "black": (file_of(Image.new("RGB", (64, 64))), "nothing"),
    "opaque black RGBA": (file_of(Image.new("RGBA", (64, 64), BLACK)), "nothing"),
    "dark grey": (file_of(Image.new("L", (64, 64), 127)), "nothing"),
    "grey": (file_of(Image.new("L", (64, 64), 128)), "left and right"),
    "transparent everywhere": (file_of(Image.new("RGBA", (64, 64), CLEAR)), "left and right"),
}


@pytest.mark.parametrize(("data", "repainted"), MASKS.values(), ids=MASKS)
def test_a_mask_is_repainted_where_it_is_white_or_if_any_part_is_transparent_where_it_is_transparent(
    data: bytes, repainted: str
) -> None:
    """Pipelines repaint from half of the brightest level on; a mask without such a level has a warning."""
    stored = inspect(data, max_bytes=len(data), max_pixels=64 * 64).data
    decoded = decode_inputs(a_job("x", task=Task.INPAINT), InputFiles(mask=stored))
    assert decoded.mask is not None
    levels = {"left": decoded.mask.getpixel((10, 30)), "right": decoded.mask.getpixel((50, 30))}
    assert (" and ".join(side for side, level in levels.items() if level >= 128) or "nothing") == repainted
    assert [warning.param for warning in decoded.warnings] == ["mask"] * (repainted == "nothing")


def test_a_mask_whose_white_part_is_cropped_off_has_a_warning() -> None:
    """It is in the last event of the job."""
    wide = Image.new("L", (300, 100))
    wide.paste(255, (0, 0, 20, 100))
    job = a_job("x", task=Task.INPAINT)
    decoded = decode_inputs(job, InputFiles(mask=file_of(wide)))
    engine_job = EngineJob(EngineRequest("x", job, a_spec(Path("tiny"))), 0, decoded)
    (warning,) = engine_job.finished(None, canceled=False).warnings
    assert warning.message.startswith("mask: repaints nothing")


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


def test_an_image_of_structure_keeps_the_details_of_its_file() -> None:
    """A model that edits gets about a megapixel of its image; one that follows it, the pixels of the result."""
    stripes = Image.new("L", (512, 512))
    stripes.putdata([255 * (at // 2 % 2) for at in range(512)] * 512)
    job = a_job("x", task=Task.EDIT, width=512, height=512, reference_sizes=((64, 64),), image_count=1)
    inputs = decode_inputs(job, InputFiles(images=(file_of(stripes.convert("RGB")),)))
    pipeline = object.__new__(FluxControlPipeline)
    image = arguments_for(pipeline, job, 0, inputs)["control_image"]
    assert image.convert("L").tobytes() == stripes.tobytes()


def test_several_images_of_structure_are_refused_by_their_own_field() -> None:
    job = a_job("x", task=Task.EDIT, reference_sizes=((64, 64),) * 2, image_count=2)
    inputs = decode_inputs(job, InputFiles(images=(file_of(Image.new("RGB", (64, 64))),) * 2))
    with pytest.raises(UnusableInput, match="takes one image, not 2") as refused:
        arguments_for(object.__new__(FluxControlPipeline), job, 0, inputs)
    assert refused.value.param == "images"


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


def test_a_long_sound_of_text_has_nothing_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = DecoderHarness(monkeypatch)
    job = a_job("song", task=Task.TEXT_TO_AUDIO, width=0, height=0, duration_s=600.0)
    harness.decoder.submit([(EngineRequest("song", job, a_spec(Path("tiny"))), 0)])
    assert [done.request.claim_key for done in harness.results.get_nowait()] == ["song"]
    harness.decoder.close()


def test_a_video_of_any_size_does_not_hold_up_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its file says of its frames can be less than what a decoder finds."""
    harness = DecoderHarness(monkeypatch, "greedy")
    data = a_video_file(2)
    video = InputRef(id="in_1", key="k", content_type="video/mp4", bytes=1, width=96, height=80, frames=2, fps=8)
    job = a_job("film", tenant="greedy", task=Task.VIDEO_TO_VIDEO, video=video, frames=2, fps=8)
    harness.decoder.submit([(EngineRequest("greedy 1", job, a_spec(Path("tiny")), InputFiles(video=data)), 0)])
    harness.submit("modest 1")
    assert harness.next() == ["modest 1"]
    harness.held["greedy"].release()
    assert harness.next() == ["greedy 1"]
    harness.decoder.close()


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
