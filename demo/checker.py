"""Recognition of the colour, shape, ground and place in an image of the demo model."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from demo.drawings import BAR, COLOURS, PLACES, SHAPES, Prompt, parse, shape_mask

# Distances between colours are Euclidean in RGB from 0 to 255; the two closest names are 107 apart.
MAX_COLOUR_DISTANCE = 53.0
MIN_VISIBLE_DISTANCE = 50.0
# The share of an image that a shape covers, and the minimal share of its pixels with its colour.
COVERAGE = (0.04, 0.5)
PURITY = 0.8
# Minimal intersection over union of the shape's pixels and a perfect shape.
MIN_IOU = 0.8
# In units of (half the side)².
AREAS = {"circle": np.pi, "square": 4.0, "triangle": 2.0, "cross": 4 * BAR * (2 - BAR)}
# The places are 0.2 of the image apart.
MAX_PLACE_DISTANCE = 0.1
BORDER = 2
# A mask pixel with fewer mask pixels in its 3x3 block is noise; the tip of a triangle has three.
MIN_NEIGHBOURS = 3

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Reading:
    """What an image shows; None for an attribute that is not recognized."""

    colour: str | None
    shape: str | None
    ground: str | None
    place: str | None


def read(image: Image.Image | NDArray[Any]) -> Reading:
    """Recognize an RGB image of any size; an array is uint8 [H, W, 3]."""
    image = image.convert("RGB") if isinstance(image, Image.Image) else image
    pixels = np.asarray(image, dtype=np.float64)
    ground_rgb = np.median(_border(pixels), axis=0)
    ground = _name(ground_rgb)
    mask, colour = _shape_pixels(pixels, ground_rgb)
    if mask is None:
        return Reading(None, None, ground, None)
    height, width = mask.shape
    shape, x, y = _fit(mask)
    return Reading(colour, shape, ground, _place(x / width, y / height))


def matches(image: Image.Image | NDArray[Any], prompt: Prompt | str) -> bool:
    """Return whether the image shows the prompt; a prompt without a place matches any place."""
    expected = parse(prompt) if isinstance(prompt, str) else prompt
    reading = read(image)
    correct = (reading.colour, reading.shape, reading.ground) == (expected.colour, expected.shape, expected.ground)
    return correct and (expected.place is None or reading.place == expected.place)


def _border(pixels: Floats) -> Floats:
    """Return the outermost pixels, [N, 3]."""
    inside = np.zeros(pixels.shape[:2], dtype=bool)
    inside[BORDER:-BORDER, BORDER:-BORDER] = True
    return pixels[~inside]


def _name(rgb: Floats) -> str | None:
    """Return the name of the nearest colour; None if it is farther than `MAX_COLOUR_DISTANCE`."""
    distances = {name: float(np.linalg.norm(rgb - np.array(value))) for name, value in COLOURS.items()}
    nearest = min(distances, key=distances.__getitem__)
    return nearest if distances[nearest] <= MAX_COLOUR_DISTANCE else None


def _shape_pixels(pixels: Floats, ground_rgb: Floats) -> tuple[Mask | None, str | None]:
    """Return the mask [H, W] of pixels nearer to the shape's colour than to the ground's, and that colour's name."""
    from_ground = np.linalg.norm(pixels - ground_rgb, axis=-1)
    visible = from_ground > MIN_VISIBLE_DISTANCE
    if not COVERAGE[0] <= visible.mean() <= COVERAGE[1]:
        return None, None
    # Pixels at the shape's edge are mixtures; the more distant half of the visible pixels has few of them.
    core = visible & (from_ground >= np.median(from_ground[visible]) * 0.8)
    rgb = np.median(pixels[core], axis=0)
    axis = rgb - ground_rgb
    along = (pixels - ground_rgb) @ axis / (axis @ axis)
    mask = np.asarray(along > 0.5)
    if not COVERAGE[0] <= mask.mean() <= COVERAGE[1]:
        return None, None
    around = _neighbours(mask)
    mask, inside = mask & (around >= MIN_NEIGHBOURS), mask & (around == 9)
    if not inside.any():
        return None, None
    near = np.linalg.norm(pixels[inside] - rgb, axis=-1) <= MAX_COLOUR_DISTANCE
    return mask, _name(rgb) if near.mean() >= PURITY else None


def _neighbours(mask: Mask) -> NDArray[np.int64]:
    """Return, for each pixel, the number of mask pixels in its 3x3 block."""
    padded = np.pad(mask, 1).astype(np.int64)
    height, width = mask.shape
    blocks = [padded[y : y + height, x : x + width] for y in range(3) for x in range(3)]
    return np.asarray(np.sum(blocks, axis=0))


def _fit(mask: Mask) -> tuple[str | None, float, float]:
    """Return the shape that fits the mask best, None if none fits well, and its centre (x, y).

    A perfect shape is aligned with the mask by area and centroid, which rounded corners hardly change.
    """
    height, width = mask.shape
    rows, columns = np.nonzero(mask)
    x, y = float(columns.mean()) + 0.5, float(rows.mean()) + 0.5
    best, best_score, best_y = None, MIN_IOU, y
    for shape in SHAPES:
        radius = float(np.sqrt(len(rows) / AREAS[shape]))
        centre_y = y - radius / 3 if shape == "triangle" else y
        template_image = shape_mask(shape, (width, height), (x, centre_y), (radius, radius))
        template = np.asarray(template_image) > 127
        score = float((mask & template).sum() / (mask | template).sum())
        if score >= best_score:
            best, best_score, best_y = shape, score, centre_y
    return best, x, best_y


def _place(x: float, y: float) -> str | None:
    """Return the place near (x, y), in fractions of width and height."""
    for place, (px, py) in PLACES.items():
        if abs(x - px) <= MAX_PLACE_DISTANCE and abs(y - py) <= MAX_PLACE_DISTANCE:
            return place
    return None
