"""The training images of the demo model: one large shape on a plain ground, with a caption."""

import random
from dataclasses import dataclass
from itertools import product

import numpy as np
from PIL import Image, ImageDraw

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 40),
    "orange": (255, 140, 0),
    "yellow": (255, 235, 50),
    "green": (20, 160, 70),
    "blue": (40, 90, 230),
    "purple": (140, 40, 170),
    "white": (250, 250, 250),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "cross")
# The centre as a fraction of (width, height).
PLACES: dict[str, tuple[float, float]] = {
    "left": (0.3, 0.5),
    "right": (0.7, 0.5),
    "top": (0.5, 0.3),
    "bottom": (0.5, 0.7),
    "center": (0.5, 0.5),
}

SQUARE_SIZE = (64, 64)  # width, height
WIDE_SIZE = (96, 64)

SUPERSAMPLING = 4
# Half the shape's side, and the jitter of its centre, as fractions of the shorter side of the image.
RADIUS_RANGE = (0.21, 0.25)
CENTRE_JITTER = 0.025
# Half the width of a bar of the cross, as a fraction of its radius.
BAR = 0.34

HELD_OUT_SHARE = 0.1
HELD_OUT_SEED = 20

Point = tuple[float, float]


@dataclass(frozen=True)
class Prompt:
    """What an image shows; `place` is None if the caption names none."""

    colour: str
    shape: str
    ground: str
    place: str | None

    def caption(self) -> str:
        """Return the caption, such as `a red circle on a blue ground, left`."""
        subject = f"{_article(self.colour)} {self.colour} {self.shape}"
        text = f"{subject} on {_article(self.ground)} {self.ground} ground"
        return text if self.place is None else f"{text}, {self.place}"


def parse(caption: str) -> Prompt:
    """Return the prompt of a caption; raises ValueError for other text."""
    words = caption.replace(",", " ").split()
    if len(words) in (7, 8) and words[3] == "on" and words[6] == "ground":
        prompt = Prompt(words[1], words[2], words[5], words[7] if len(words) == 8 else None)
        known = prompt.colour in COLOURS and prompt.ground in COLOURS and prompt.shape in SHAPES
        if known and (prompt.place is None or prompt.place in PLACES):
            return prompt
    raise ValueError(f"not a caption of the demo model: {caption!r}")


def all_prompts() -> list[Prompt]:
    """Return every prompt with a place, in a fixed order; a shape never has the colour of its ground."""
    return [
        Prompt(colour, shape, ground, place)
        for colour, shape, ground, place in product(COLOURS, SHAPES, COLOURS, PLACES)
        if colour != ground
    ]


def split_prompts() -> tuple[list[Prompt], list[Prompt]]:
    """Return the training prompts and the held-out ones; the split is constant."""
    prompts = all_prompts()
    count = round(len(prompts) * HELD_OUT_SHARE)
    held_out = set(random.Random(HELD_OUT_SEED).sample(prompts, count))
    return [p for p in prompts if p not in held_out], [p for p in prompts if p in held_out]


def outline(shape: str, centre: Point, radius: tuple[float, float]) -> list[Point]:
    """Return the corners of a square, triangle or cross that fills the box centre ± radius (x, y)."""
    (x, y), (rx, ry) = centre, radius
    corners: list[Point]
    if shape == "square":
        corners = [(-1, -1), (1, -1), (1, 1), (-1, 1)]
    elif shape == "triangle":
        corners = [(0, -1), (1, 1), (-1, 1)]
    elif shape == "cross":
        b = BAR
        corners = [(-b, -1), (b, -1), (b, -b), (1, -b), (1, b), (b, b)]
        corners += [(b, 1), (-b, 1), (-b, b), (-1, b), (-1, -b), (-b, -b)]
    else:
        raise ValueError(f"no outline for {shape!r}")
    return [(x + rx * dx, y + ry * dy) for dx, dy in corners]


def shape_mask(shape: str, size: tuple[int, int], centre: Point, radius: tuple[float, float]) -> Image.Image:
    """Return a grey image of `size` (width, height): 255 inside the shape, antialiased at its edge."""
    scale = SUPERSAMPLING
    fine = Image.new("L", (size[0] * scale, size[1] * scale), 0)
    pen = ImageDraw.Draw(fine)
    # PIL includes edge pixels; without the half pixel every shape would be larger.
    x, y = centre[0] * scale - 0.5, centre[1] * scale - 0.5
    rx, ry = radius[0] * scale, radius[1] * scale
    if shape == "circle":
        pen.ellipse((x - rx, y - ry, x + rx, y + ry), fill=255)
    else:
        pen.polygon(outline(shape, (x, y), (rx, ry)), fill=255)
    return fine.resize(size, Image.Resampling.BOX)


def draw(prompt: Prompt, size: tuple[int, int], seed: int) -> Image.Image:
    """Return an RGB image of the prompt, determined by `size` (width, height) and `seed`."""
    rng = random.Random(seed)
    place = prompt.place if prompt.place is not None else rng.choice(tuple(PLACES))
    short = min(size)
    radius = short * rng.uniform(*RADIUS_RANGE)
    fx, fy = PLACES[place]
    centre = (
        size[0] * fx + short * rng.uniform(-CENTRE_JITTER, CENTRE_JITTER),
        size[1] * fy + short * rng.uniform(-CENTRE_JITTER, CENTRE_JITTER),
    )
    mask = shape_mask(prompt.shape, size, centre, (radius, radius))
    ground = Image.new("RGB", size, COLOURS[prompt.ground])
    ground.paste(COLOURS[prompt.colour], (0, 0), mask)
    return ground


def draw_batch(
    prompts: list[Prompt], size: tuple[int, int], seed: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return images of the prompts as uint8 [N, H, W, 3], with the seeds seed, seed + 1, ..."""
    images = [np.asarray(draw(prompt, size, seed + n)) for n, prompt in enumerate(prompts)]
    return np.stack(images)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
