"""Input images: decoding a job's files and scaling them to the size that its pipeline gets."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import safetensors.torch
import torch
from PIL import Image, ImageFile, ImageOps

from shared.errors import UnusableInput
from shared.inputs.formats.latents import NAME
from shared.job import Job
from shared.job_record import FieldWarning
from shared.tasks import Task
from worker.engine.outputs import Audio
from worker.engine.pipelines.inpainting import Box, Paste, crop_region, paste_of, repaints, source_box
from worker.engine.pipelines.input_audio import decode_audio, decode_soundtrack, resampled
from worker.engine.pipelines.input_videos import decode_video
from worker.engine.protocol import InputFiles

MAX_OBJECT_SIDE = 2048
"""Of an image that becomes a mesh: hy3dgen copies it into a square of its longer side, in float32, and scales that to
512 pixels."""

_FORMATS = ("PNG", "JPEG", "WEBP")
_KEY_SCALES = {"L;2": 255 // 3, "L;4": 255 // 15, "RGB;16B": 1 / 256}
"""Pillow's raw modes of PNGs whose samples it scales to 8 bits, but not their transparent colour."""


@dataclass(frozen=True)
class InputImages:
    """A job's decoded inputs: start or reference images, the mask of inpainting, the last image of a video, and the
    control images. `warnings` name those without effect; `paste` is for the results of inpainting. `latents` stand for
    the image to start from. `video` and `face_video` have the frames that the job uses; `audio` is the sound to start
    from, or that of a video to enlarge, and `audio_rates` has it at the rates of models. `structure` is the only image
    to edit, cropped to the job's size, if that of `images` is smaller."""

    images: tuple[Image.Image, ...] = ()
    mask: Image.Image | None = None
    last_image: Image.Image | None = None
    controls: tuple[Image.Image, ...] = ()
    warnings: tuple[FieldWarning, ...] = ()
    paste: Paste | None = None
    latents: torch.Tensor | None = None
    video: tuple[Image.Image, ...] = ()
    face_video: tuple[Image.Image, ...] = ()
    audio: Audio | None = None
    structure: Image.Image | None = None
    audio_rates: dict[int, Audio] = field(default_factory=dict, compare=False)

    def audio_at(self, rate: int) -> Audio | None:
        """Return the sound to start from at a rate; it is resampled once for all images of a job."""
        if self.audio is None:
            return None
        if rate not in self.audio_rates:
            self.audio_rates[rate] = resampled(self.audio, rate)
        return self.audio_rates[rate]


def decode_inputs(job: Job, files: InputFiles) -> InputImages:
    """Decode a job's input images; raises `UnusableInput` naming the field of one that cannot be decoded.

    Images to edit or upscale keep their proportions, and one to edit is cropped too for models that follow it; all
    others are cropped to the job's size.
    """
    width, height = job.width, job.height
    if job.task.makes_audio:
        return InputImages(audio=None if files.audio is None else decode_audio(files.audio, job.duration_s or 0.0))
    if job.task is Task.IMAGE_TO_MESH:
        return InputImages(tuple(_object_image(data) for data in files.images))
    if job.task is Task.EDIT:
        sized = zip(files.images, job.reference_sizes, strict=True)
        images = tuple(scale_reference(data, size, keep_alpha=bool(job.layers)) for data, size in sized)
        is_smaller = len(images) == 1 and (images[0].width < width or images[0].height < height)
        return InputImages(images, structure=fit_image(files.images[0], width, height) if is_smaller else None)
    if job.task is Task.UPSCALE:
        return InputImages(tuple(_whole_image(data) for data in files.images))
    if job.images and job.images[0].is_latents:
        controls = tuple(_control_image(data, at, job) for at, data in enumerate(files.controls))
        return InputImages(controls=controls, latents=_read_latents(files.images[0]))
    if files.video is not None:
        frames, warnings = decode_video(files.video, job)
        faces, more = ((), ()) if files.face_video is None else decode_video(files.face_video, job, "face_video")
        images = tuple(fit_image(data, width, height) for data in files.images)
        sound = None
        if job.task is Task.UPSCALE_VIDEO:
            sound, more = decode_soundtrack(files.video, job.frames / (job.fps or 1))
        return InputImages(images, video=frames, face_video=faces, audio=sound, warnings=(*warnings, *more))
    if files.mask is not None:
        return _decode_inpainting(job, files, files.mask)
    return InputImages(
        images=tuple(fit_image(data, width, height) for data in files.images),
        last_image=None if files.last_image is None else fit_image(files.last_image, width, height, "last_image"),
        controls=tuple(_control_image(data, at, job) for at, data in enumerate(files.controls)),
    )


def _decode_inpainting(job: Job, files: InputFiles, mask_file: bytes) -> InputImages:
    width, height = job.width, job.height
    mask = fit_mask(mask_file, width, height)
    region = None if job.mask_padding is None else crop_region(mask, job.mask_padding)
    paste = None
    if job.keep_unmasked or region is not None:
        kept = mask if job.keep_unmasked else Image.new("L", mask.size, "white")
        paste = paste_of(fit_image(files.images[0], width, height), kept, job.mask_blur, region)
    return InputImages(
        images=tuple(fit_image(data, width, height, region=region) for data in files.images),
        mask=mask if region is None else fit_mask(mask_file, width, height, region),
        controls=tuple(_control_image(data, at, job, region) for at, data in enumerate(files.controls)),
        warnings=_mask_warnings(mask),
        paste=paste,
    )


def _read_latents(data: bytes) -> torch.Tensor:
    try:
        return safetensors.torch.load(data)[NAME]
    except (safetensors.SafetensorError, LookupError) as error:
        raise UnusableInput(f"the latents cannot be read: {error}", param="image") from error


def _mask_warnings(mask: Image.Image) -> tuple[FieldWarning, ...]:
    if repaints(mask):
        return ()
    message = (
        "mask: repaints nothing: no part is white or transparent, as cropped to the job's size; "
        "make what is to be repainted white, or transparent"
    )
    return (FieldWarning(param="mask", message=message),)


def _control_image(data: bytes, at: int, job: Job, region: Box | None = None) -> Image.Image:
    param = f"controls.{at}.image"
    if job.controls[at].kind in ("controlnet", "structure"):
        return fit_image(data, job.width, job.height, param, region)
    with _decoded(data, param) as image:  # an image encoder scales it
        return _opaque(image)


def fit_image(data: bytes, width: int, height: int, param: str = "image", region: Box | None = None) -> Image.Image:
    """Decode an image, upright and opaque, scaled to cover `width` x `height` and cropped; `region`: only this part of
    the result, at its size."""
    with _decoded(data, param) as image:
        return _fit(_opaque(image), (width, height), Image.Resampling.LANCZOS, region)


def _whole_image(data: bytes) -> Image.Image:
    """Decode an image, upright and opaque, in its own size."""
    with _decoded(data, "image") as image:
        return _opaque(image)


def _fit(image: Image.Image, size: tuple[int, int], filter_: Image.Resampling, region: Box | None) -> Image.Image:
    if region is None:
        return ImageOps.fit(image, size, filter_)
    return image.resize(size, filter_, box=source_box(image.size, size, region))


def fit_mask(data: bytes, width: int, height: int, region: Box | None = None) -> Image.Image:
    """Decode a mask, cropped like `fit_image`. White is repainted.

    If any pixel is transparent, transparent areas are repainted instead, and colours do not count.
    """
    with _decoded(data, "mask") as image:
        return _fit(_mask_levels(image), (width, height), Image.Resampling.BILINEAR, region)


def _mask_levels(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        mask = ImageOps.invert(image.getchannel("A"))
        if repaints(mask):
            return mask
    return image.convert("L")


def scale_reference(data: bytes, size: tuple[int, int], *, keep_alpha: bool = False) -> Image.Image:
    """Decode an image to edit, upright, and scale it to `size`; RGBA with `keep_alpha`, else opaque RGB."""
    with _decoded(data, "image") as image:
        pixels = image.convert("RGBA") if keep_alpha else _opaque(image)
        return pixels.resize(size, Image.Resampling.LANCZOS)


def _object_image(data: bytes) -> Image.Image:
    """Decode the image of an object, upright, with its alpha channel, which separates the object from the ground."""
    with _decoded(data, "image") as image:
        image.thumbnail((MAX_OBJECT_SIDE, MAX_OBJECT_SIDE))
        pixels = image.convert("RGBA")
    if pixels.getchannel("A").getextrema()[1] == 0:
        raise UnusableInput("the input image is empty: all of it is transparent", param="image")
    return pixels


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
