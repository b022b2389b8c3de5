"""Input images: decoding a job's files and scaling them to the size that its pipeline gets."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import Image, ImageOps

from shared.errors import UnusableInput
from shared.job import Job, Task
from worker.engine.protocol import InputFiles

_FORMATS = ("PNG", "JPEG", "WEBP")


@dataclass(frozen=True)
class InputImages:
    """A job's decoded inputs: start or reference images, the mask of inpainting, the last image of a video, and the
    control images."""

    images: tuple[Image.Image, ...] = ()
    mask: Image.Image | None = None
    last_image: Image.Image | None = None
    controls: tuple[Image.Image, ...] = ()


def decode_inputs(job: Job, files: InputFiles) -> InputImages:
    """Decode a job's input images; raises `UnusableInput` naming the field of one that cannot be decoded.

    Images to edit keep their proportions; all others are cropped to the job's size.
    """
    width, height = job.width, job.height
    if job.task is Task.EDIT:
        sized = zip(files.images, job.reference_sizes, strict=True)
        return InputImages(tuple(scale_reference(data, size, keep_alpha=bool(job.layers)) for data, size in sized))
    return InputImages(
        images=tuple(fit_image(data, width, height) for data in files.images),
        mask=None if files.mask is None else fit_mask(files.mask, width, height),
        last_image=None if files.last_image is None else fit_image(files.last_image, width, height, "last_image"),
        controls=tuple(_control_image(data, at, job) for at, data in enumerate(files.controls)),
    )


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
    """Decode a mask, cropped like `fit_image`. White is repainted; in an image with transparency, transparent areas."""
    with _decoded(data, "mask") as image:
        if image.has_transparency_data:
            mask = ImageOps.invert(image.convert("RGBA").getchannel("A"))
        else:
            mask = image.convert("L")
        return ImageOps.fit(mask, (width, height), Image.Resampling.BILINEAR)


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
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I"):  # 16-bit greys, as of depth maps: Pillow would clip all above 255 to white
                image = image.convert("I").point(lambda value: value * (255 / 65_535)).convert("L")
            yield image
    except Exception as error:  # Pillow's readers raise many types: EOFError, struct.error, zlib.error
        raise UnusableInput(f"the input image cannot be decoded: {error}", param=param) from error
