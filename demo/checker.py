"""Reads off a picture what the demo model was asked to draw: colour, shape, ground and place."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from demo.pictures import BAR, COLOURS, PLACES, SHAPES, Prompt, parse, shape_mask

# Distances between colours are Euclidean in RGB from 0 to 255; the two closest names are 107 apart.
NAMED_WITHIN = 53.0
VISIBLE_FROM = 50.0
# The share of a picture that the shape may cover, and of its pixels that must have its colour.
COVERAGE = (0.04, 0.5)
PURITY = 0.8
# How well the shape's pixels must agree with those of a perfect shape (intersection over union).
AGREEMENT = 0.8
# In units of half the side, squared.
AREAS = {"circle": np.pi, "square": 4.0, "triangle": 2.0, "cross": 4 * BAR * (2 - BAR)}
# The places are 0.2 of the picture apart.
PLACE_WITHIN = 0.1
BORDER = 2
# A pixel with fewer of its 3x3 block in the mask is noise; the tip of a triangle has three.
SPECK = 3

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Reading:
    """What a picture shows; None for whatever cannot be told."""

    colour: str | None
    shape: str | None
    ground: str | None
    place: str | None


def read(picture: Image.Image | NDArray[Any]) -> Reading:
    """Reads a picture, RGB and of any size; an array is uint8 [H, W, 3]."""
    image = picture.convert("RGB") if isinstance(picture, Image.Image) else picture
    pixels = np.asarray(image, dtype=np.float64)
    ground_rgb = np.median(_border(pixels), axis=0)
    ground = _name(ground_rgb)
    mask, colour = _shape_pixels(pixels, ground_rgb)
    if mask is None:
        return Reading(None, None, ground, None)
    height, width = mask.shape
    shape, x, y = _fit(mask)
    return Reading(colour, shape, ground, _place(x / width, y / height))


def matches(picture: Image.Image | NDArray[Any], prompt: Prompt | str) -> bool:
    """Whether the picture shows all that the prompt asks for; any place will do if it names none."""
    wanted = parse(prompt) if isinstance(prompt, str) else prompt
    seen = read(picture)
    drawn = (seen.colour, seen.shape, seen.ground) == (wanted.colour, wanted.shape, wanted.ground)
    return drawn and (wanted.place is None or seen.place == wanted.place)


def _border(pixels: Floats) -> Floats:
    """The outermost pixels, [N, 3]."""
    inside = np.zeros(pixels.shape[:2], dtype=bool)
    inside[BORDER:-BORDER, BORDER:-BORDER] = True
    return pixels[~inside]


def _name(rgb: Floats) -> str | None:
    """The nearest colour's name, unless even that one is far off."""
    distances = {name: float(np.linalg.norm(rgb - np.array(value))) for name, value in COLOURS.items()}
    nearest = min(distances, key=distances.__getitem__)
    return nearest if distances[nearest] <= NAMED_WITHIN else None


def _shape_pixels(pixels: Floats, ground_rgb: Floats) -> tuple[Mask | None, str | None]:
    """The pixels [H, W] that are nearer the shape's colour than the ground's, and that colour's name."""
    from_ground = np.linalg.norm(pixels - ground_rgb, axis=-1)
    visible = from_ground > VISIBLE_FROM
    if not COVERAGE[0] <= visible.mean() <= COVERAGE[1]:
        return None, None
    # Pixels at the shape's edge are mixtures; the far half of the visible ones holds few of them.
    core = visible & (from_ground >= np.median(from_ground[visible]) * 0.8)
    rgb = np.median(pixels[core], axis=0)
    axis = rgb - ground_rgb
    along = (pixels - ground_rgb) @ axis / (axis @ axis)
    mask = np.asarray(along > 0.5)
    if not COVERAGE[0] <= mask.mean() <= COVERAGE[1]:
        return None, None
    around = _neighbours(mask)
    mask, inside = mask & (around >= SPECK), mask & (around == 9)
    if not inside.any():
        return None, None
    near = np.linalg.norm(pixels[inside] - rgb, axis=-1) <= NAMED_WITHIN
    return mask, _name(rgb) if near.mean() >= PURITY else None


def _neighbours(mask: Mask) -> NDArray[np.int64]:
    """For each pixel the number of its 3x3 block, itself included, that are in the mask."""
    padded = np.pad(mask, 1).astype(np.int64)
    height, width = mask.shape
    blocks = [padded[y : y + height, x : x + width] for y in range(3) for x in range(3)]
    return np.asarray(np.sum(blocks, axis=0))


def _fit(mask: Mask) -> tuple[str | None, float, float]:
    """The shape whose perfect form agrees best with the mask, if it does well, and its centre (x, y).

    Each form is laid over the mask by area and centroid, which rounded corners hardly move.
    """
    height, width = mask.shape
    rows, columns = np.nonzero(mask)
    x, y = float(columns.mean()) + 0.5, float(rows.mean()) + 0.5
    best, best_score, best_y = None, AGREEMENT, y
    for shape in SHAPES:
        radius = float(np.sqrt(len(rows) / AREAS[shape]))
        centre_y = y - radius / 3 if shape == "triangle" else y
        drawn = shape_mask(shape, (width, height), (x, centre_y), (radius, radius))
        template = np.asarray(drawn) > 127
        score = float((mask & template).sum() / (mask | template).sum())
        if score >= best_score:
            best, best_score, best_y = shape, score, centre_y
    return best, x, best_y


def _place(x: float, y: float) -> str | None:
    """The place whose centre is near (x, y), which are fractions of width and height."""
    for place, (px, py) in PLACES.items():
        if abs(x - px) <= PLACE_WITHIN and abs(y - py) <= PLACE_WITHIN:
            return place
    return None
