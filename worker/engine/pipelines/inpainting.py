"""Inpainting as people expect it: what is not masked stays as it is, and a small mask gets the model's full size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

from worker.engine.outputs import Pixels

HALF = 128
"""Pipelines repaint where a mask has at least this level: they make it black and white."""

Box = tuple[int, int, int, int]
"""Left, top, right and bottom, in pixels of the job's size."""


def repaints(mask: Image.Image) -> bool:
    return any(mask.histogram()[HALF:])


def crop_region(mask: Image.Image, padding: int) -> Box | None:
    """Return the region to make in place of the whole image: what is masked, with `padding` pixels around it.

    It has the proportions of the image, within a pixel, and is inside it. None for a mask that repaints nothing.
    """
    bounds = mask.point(lambda level: 255 if level >= HALF else 0).getbbox()
    if bounds is None:
        return None
    width, height = mask.size
    left, top, right, bottom = bounds
    columns, rows = right - left + 2 * padding, bottom - top + 2 * padding
    scale = min(1.0, max(columns / width, rows / height))
    columns, rows = math.ceil(width * scale), math.ceil(height * scale)
    left = min(max(0, (left + right - columns) // 2), width - columns)
    top = min(max(0, (top + bottom - rows) // 2), height - rows)
    return left, top, left + columns, top + rows


def source_box(source: tuple[int, int], size: tuple[int, int], region: Box) -> tuple[float, float, float, float]:
    """Return where a region of an image of `size` is in its source, which is scaled to cover it and cropped around the
    middle."""
    scale = min(source[0] / size[0], source[1] / size[1])
    left, top = ((full - side * scale) / 2 for full, side in zip(source, size, strict=True))
    box = (left + region[0] * scale, top + region[1] * scale, left + region[2] * scale, top + region[3] * scale)
    return max(0.0, box[0]), max(0.0, box[1]), min(float(source[0]), box[2]), min(float(source[1]), box[3])


@dataclass(frozen=True)
class Paste:
    """Puts a result into the image that it was made from: at `region`, as far as `alpha` is white."""

    image: Image.Image
    alpha: Image.Image
    region: Box | None = None

    def __call__(self, pixels: Pixels) -> Pixels:
        left, top, right, bottom = self.region or (0, 0, *self.image.size)
        made = Image.fromarray(pixels)
        if made.size != (right - left, bottom - top):  # also where a pipeline rounds the sides
            made = made.resize((right - left, bottom - top), Image.Resampling.LANCZOS)
        whole = self.image.copy()
        whole.paste(made, (left, top))
        pasted: Pixels = np.asarray(Image.composite(whole, self.image, self.alpha))
        return pasted


def paste_of(image: Image.Image, mask: Image.Image, blur: int, region: Box | None) -> Paste:
    """Return what pastes a result into `image` where `mask` repaints, with an edge that fades over `blur` pixels."""
    alpha = mask.point(lambda level: 255 if level >= HALF else 0)
    return Paste(image, alpha.filter(ImageFilter.GaussianBlur(blur)) if blur else alpha, region)
