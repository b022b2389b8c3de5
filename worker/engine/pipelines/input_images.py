"""Input images: decoding a job's files and scaling them to the size that its pipeline gets."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFile, ImageOps

from shared.errors import UnusableInput
from shared.job import FieldWarning, Job
from shared.job_fields import Task
from worker.engine.protocol import InputFiles

_FORMATS = ("PNG", "JPEG", "WEBP")
_HALF = 128
"""Pipelines repaint where a mask has at least this level: they make it black and white."""

_KEY_SCALES = {"L;2": 255 // 3, "L;4": 255 // 15, "RGB;16B": 1 / 256}
"""Pillow's raw modes of PNGs whose samples it scales to 8 bits, but not their transparent colour."""


@dataclass(frozen=True)
class InputImages:
    """A job's decoded inputs: start or reference images, the mask of inpainting, the last image of a video, and the
    control images. `warnings` name those without effect."""

    images: tuple[Image.Image, ...] = ()
    mask: Image.Image | None = None
    last_image: Image.Image | None = None
    controls: tuple[Image.Image, ...] = ()
    warnings: tuple[FieldWarning, ...] = ()


def decode_inputs(job: Job, files: InputFiles) -> InputImages:
    """Decode a job's input images; raises `UnusableInput` naming the field of one that cannot be decoded.

    Images to edit keep their proportions; all others are cropped to the job's size.
    """
    width, height = job.width, job.height
    if job.task is Task.EDIT:
        sized = zip(files.images, job.reference_sizes, strict=True)
        return InputImages(tuple(scale_reference(data, size, keep_alpha=bool(job.layers)) for data, size in sized))
    mask = None if files.mask is None else fit_mask(files.mask, width, height)
    return InputImages(
        images=tuple(fit_image(data, width, height) for data in files.images),
        mask=mask,
        last_image=None if files.last_image is None else fit_image(files.last_image, width, height, "last_image"),
        controls=tuple(_control_image(data, at, job) for at, data in enumerate(files.controls)),
        warnings=() if mask is None else _mask_warnings(mask),
    )


def _mask_warnings(mask: Image.Image) -> tuple[FieldWarning, ...]:
    if _repaints(mask):
        return ()
    message = (
        "mask: repaints nothing: no part is white or transparent, as cropped to the job's size; "
        "make what is to be repainted white, or transparent"
    )
    return (FieldWarning(param="mask", message=message),)


def _control_image(data: bytes, at: int, job: Job) -> Image.Image:
    param = f"controls.{at}.image"
    if job.controls[at].kind == "controlnet":
        return fit_image(data, job.width, job.height, param)
    with _decoded(data, param) as image:  # an image encoder scales it
        return _opaque(image)


def fit_image(data: bytes, width: int, height: int, param: str = "image") -> Image.Image:
    """Decode an image, upright and opaque, scaled to cover `width` x `height` and cropped."""
    with _decoded(data, param) as image:
        return ImageOps.fit(_opaque(image), (width, height), Image.Resampling.LANCZOS)


def fit_mask(data: bytes, width: int, height: int) -> Image.Image:
    """Decode a mask, cropped like `fit_image`. White is repainted.

    If any pixel is transparent, transparent areas are repainted instead, and colours do not count.
    """
    with _decoded(data, "mask") as image:
        return ImageOps.fit(_mask_levels(image), (width, height), Image.Resampling.BILINEAR)


def _mask_levels(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        mask = ImageOps.invert(image.getchannel("A"))
        if _repaints(mask):
            return mask
    return image.convert("L")


def _repaints(mask: Image.Image) -> bool:
    return any(mask.histogram()[_HALF:])


def scale_reference(data: bytes, size: tuple[int, int], *, keep_alpha: bool = False) -> Image.Image:
    """Decode an image to edit, upright, and scale it to `size`; RGBA with `keep_alpha`, else opaque RGB."""
    with _decoded(data, "image") as image:
        pixels = image.convert("RGBA") if keep_alpha else _opaque(image)
        return pixels.resize(size, Image.Resampling.LANCZOS)


def _opaque(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image.convert("RGB")


@contextmanager
def _decoded(data: bytes, param: str) -> Iterator[Image.Image]:
    """Yield the upright image. Pillow decodes lazily, so errors of the file are raised while it is used."""
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as opened:
            _scale_transparent_colour(opened)
            image = ImageOps.exif_transpose(opened)
            yield _in_8_bits(image) if image.mode.startswith("I") else image
    except Exception as error:  # Pillow's readers raise many types: EOFError, struct.error, zlib.error
        raise UnusableInput(f"the input image cannot be decoded: {error}", param=param) from error


def _scale_transparent_colour(opened: ImageFile.ImageFile) -> None:
    key = opened.info.get("transparency")
    scale = _KEY_SCALES.get(str(opened.tile[0].args)) if opened.tile else None
    if scale is not None and isinstance(key, int):
        opened.info["transparency"] = int(key * scale)
    elif scale is not None and isinstance(key, tuple):
        opened.info["transparency"] = tuple(int(level * scale) for level in key)


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Return 16-bit greys, as of depth maps, in 8 bits: Pillow would clip all above 255 to white."""
    deep, key = image.convert("I"), image.info.get("transparency")
    greys = deep.point(lambda value: value * (255 / 65_535)).convert("L")
    greys.info.pop("transparency", None)
    if key is None:
        return greys
    alpha = np.where(np.asarray(deep) == key, 0, 255).astype(np.uint8)
    return Image.merge("LA", (greys, Image.fromarray(alpha)))
