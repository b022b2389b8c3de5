"""What is not masked stays, and a small mask gets the model's full size."""

from __future__ import annotations

import io

import numpy as np
import pytest
from harness.engine import a_job
from PIL import Image

from shared.tasks import Task
from worker.engine.pipelines.inpainting import crop_region, source_box
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.protocol import InputFiles

SIDE = 64


def file_of(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(7).integers(0, 256, (height, width, 3), dtype=np.uint8))


def mask_of(box: tuple[int, int, int, int], size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    mask = Image.new("L", size)
    mask.paste(255, box)
    return mask


def pasted(image: Image.Image, mask: Image.Image, made: str | Image.Image = "red", **fields: object) -> np.ndarray:
    """Return the result of a job whose pipeline makes `made`."""
    job = a_job("x", task=Task.INPAINT, **{"keep_unmasked": True, **fields})
    inputs = decode_inputs(job, InputFiles(images=(file_of(image),), mask=file_of(mask)))
    result = Image.new("RGB", (SIDE, SIDE), made) if isinstance(made, str) else made
    assert inputs.paste is not None
    return inputs.paste(np.asarray(result))


def test_what_is_not_masked_stays_bit_for_bit() -> None:
    image, mask = noise(SIDE, SIDE), mask_of((10, 20, 30, 40))
    result, kept = pasted(image, mask), np.asarray(mask) == 0
    assert np.array_equal(result[kept], np.asarray(image)[kept])
    assert (result[~kept] == (255, 0, 0)).all()


def test_a_result_of_another_size_is_scaled() -> None:
    """Some pipelines round the sides, of models whose files do not say so."""
    image, mask = noise(SIDE, SIDE), mask_of((10, 20, 30, 40))
    result = pasted(image, mask, Image.new("RGB", (SIDE - 8, SIDE), "red"))
    assert np.array_equal(result, pasted(image, mask))


def test_an_edge_fades_over_the_blur_and_not_further() -> None:
    """Far from the edge the image stays bit for bit."""
    image, mask = noise(SIDE, SIDE), mask_of((0, 0, 32, SIDE))
    result, plain = pasted(image, mask, mask_blur=2), np.asarray(image)
    assert np.array_equal(result[:, 44:], plain[:, 44:])
    assert (result[:, :20] == (255, 0, 0)).all()
    assert not np.array_equal(result[:, 32:34], plain[:, 32:34])


def test_a_result_is_as_the_pipeline_made_it_on_request() -> None:
    job = a_job("x", task=Task.INPAINT, keep_unmasked=False)
    files = InputFiles(images=(file_of(noise(SIDE, SIDE)),), mask=file_of(mask_of((0, 0, 9, 9))))
    assert decode_inputs(job, files).paste is None


@pytest.mark.parametrize("keep_unmasked", [True, False])
def test_only_the_masked_region_is_made_and_put_back(keep_unmasked: bool) -> None:
    """The pipeline gets the region at its full size, from the image as it was sent."""
    source = noise(4 * SIDE, 4 * SIDE)
    mask = mask_of((96, 96, 128, 128), source.size)  # 8 x 8 pixels of the job, from (24, 24)
    fields = {"mask_padding": 4, "keep_unmasked": keep_unmasked}
    job = a_job("x", task=Task.INPAINT, **fields)
    inputs = decode_inputs(job, InputFiles(images=(file_of(source),), mask=file_of(mask)))
    assert inputs.mask is not None
    assert np.array_equal(np.asarray(inputs.images[0]), np.asarray(source.crop((80, 80, 144, 144))))
    assert np.array_equal(np.asarray(inputs.mask) >= 128, np.asarray(mask.crop((80, 80, 144, 144))) >= 128)

    result = pasted(source, mask, **fields)
    whole = np.asarray(source.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    changed = slice(24, 32) if keep_unmasked else slice(20, 36)
    assert (result[changed, changed] == (255, 0, 0)).all()
    outside = np.ones((SIDE, SIDE), bool)
    outside[changed, changed] = False
    assert np.array_equal(result[outside], whole[outside])


def test_controls_are_cropped_with_their_image() -> None:
    source, mask = noise(SIDE, SIDE), mask_of((0, 0, 16, 16))
    controls = ({"id": "edges", "kind": "controlnet", "scale": 1.0, "start": 0.0, "end": 1.0},)
    job = a_job("x", task=Task.INPAINT, mask_padding=0, controls=controls)
    inputs = decode_inputs(job, InputFiles((file_of(source),), file_of(mask), controls=(file_of(source),)))
    assert np.array_equal(np.asarray(inputs.controls[0]), np.asarray(inputs.images[0]))


@pytest.mark.parametrize(
    ("box", "size", "padding", "region"),
    [
        ((24, 24, 32, 32), (64, 64), 4, (20, 20, 36, 36)),
        ((0, 0, 8, 8), (64, 64), 4, (0, 0, 16, 16)),
        ((56, 56, 64, 64), (64, 64), 4, (48, 48, 64, 64)),
        ((0, 30, 64, 34), (64, 64), 0, (0, 0, 64, 64)),
        ((50, 20, 60, 30), (128, 64), 3, (39, 17, 71, 33)),
        ((10, 10, 12, 12), (64, 64), 4096, (0, 0, 64, 64)),
        ((0, 0, 0, 0), (64, 64), 4, None),
    ],
)
def test_a_region_has_the_proportions_of_the_image_and_is_inside_it(
    box: tuple[int, int, int, int], size: tuple[int, int], padding: int, region: tuple[int, ...] | None
) -> None:
    assert crop_region(mask_of(box, size), padding) == region


@pytest.mark.parametrize(
    ("source", "size", "region", "box"),
    [
        ((256, 256), (64, 64), (20, 20, 36, 36), (80, 80, 144, 144)),
        ((512, 256), (64, 64), (0, 0, 64, 64), (128, 0, 384, 256)),
        ((32, 64), (64, 64), (0, 0, 32, 32), (0, 16, 16, 32)),
    ],
)
def test_a_region_is_found_in_the_image_as_it_was_sent(
    source: tuple[int, int], size: tuple[int, int], region: tuple[int, int, int, int], box: tuple[float, ...]
) -> None:
    assert source_box(source, size, region) == pytest.approx(box)
