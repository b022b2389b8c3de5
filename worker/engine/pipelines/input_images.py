"""From the files of a job's input pictures to pictures of the size that its pipeline is to get."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import Image, ImageOps

from shared.errors import InferenceFailed
from shared.job import Job, Task
from worker.engine.protocol import InputFiles


@dataclass(frozen=True)
class InputImages:
    """A job's input pictures, decoded: what it starts from or edits, where to repaint, what a video ends with."""

    images: tuple[Image.Image, ...] = ()
    mask: Image.Image | None = None
    last_image: Image.Image | None = None


def prepare_inputs(job: Job, files: InputFiles) -> InputImages:
    """Decode a job's input pictures; raises `InferenceFailed` naming the field of one that cannot be decoded.

    Pictures to edit keep their proportions; all others are cut to the job's size.
    """
    width, height = job.width, job.height
    if job.task is Task.EDIT:
        sized = zip(files.images, job.reference_sizes, strict=True)
        return InputImages(tuple(reference(data, size, see_through=bool(job.layers)) for data, size in sized))
    return InputImages(
        images=tuple(fit_image(data, width, height) for data in files.images),
        mask=None if files.mask is None else fit_mask(files.mask, width, height),
        last_image=None if files.last_image is None else fit_image(files.last_image, width, height, "last_image"),
    )


def fit_image(data: bytes, width: int, height: int, param: str = "image") -> Image.Image:
    """Decode an input picture, upright and without transparency, scaled to cover `width` x `height` and cropped."""
    with _upright(data, param) as picture:
        return ImageOps.fit(_opaque(picture), (width, height), Image.Resampling.LANCZOS)


def fit_mask(data: bytes, width: int, height: int) -> Image.Image:
    """Decode a mask, cut as `fit_picture` cuts: white is repainted, or what is transparent if anything is."""
    with _upright(data, "mask") as picture:
        if picture.has_transparency_data:
            mask = ImageOps.invert(picture.convert("RGBA").getchannel("A"))
        else:
            mask = picture.convert("L")
        return ImageOps.fit(mask, (width, height), Image.Resampling.BILINEAR)


def reference(data: bytes, size: tuple[int, int], *, see_through: bool = False) -> Image.Image:
    """Decode a picture to edit, upright, and scale it to `size`; RGBA if it is to keep its transparency."""
    with _upright(data, "image") as picture:
        pixels = picture.convert("RGBA") if see_through else _opaque(picture)
        return pixels.resize(size, Image.Resampling.LANCZOS)


def _opaque(picture: Image.Image) -> Image.Image:
    if picture.has_transparency_data:
        clear = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear)
    return picture.convert("RGB")


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Scale 16-bit greys, as of depth maps, to 8 bits; Pillow's own conversion would make all above 255 white."""
    if not picture.mode.startswith("I"):
        return picture
    return picture.convert("I").point(lambda value: value * (255 / 65_535)).convert("L")


@contextmanager
def _upright(data: bytes, param: str) -> Iterator[Image.Image]:
    """Give the picture; whatever its file lacks is found while it is used."""
    try:
        with Image.open(io.BytesIO(data)) as opened:
            yield _eight_bits(ImageOps.exif_transpose(opened))
    except Exception as error:  # Pillow's readers raise what they meet: EOFError, struct.error, zlib.error
        raise InferenceFailed(f"the input picture cannot be decoded: {error}", param=param) from error
