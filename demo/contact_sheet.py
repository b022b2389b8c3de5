"""The contact sheet: every image above its prompt."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

COLUMNS = 8
CELL = (216, 212)
SCALE = 2
MARGIN = 8
INPUT_SIZE = (60, 60)
LINE_CHARS, LINE_HEIGHT, FONT_SIZE = 34, 15, 12
WHITE, BLACK, GREY, RED = (255, 255, 255), (20, 20, 20), (110, 110, 110), (200, 0, 0)


@dataclass(frozen=True)
class Cell:
    """An image and its prompt; `correct` if the image shows the prompt."""

    image: Image.Image
    prompt: str
    details: str
    correct: bool
    input_image: Image.Image | None = None


def contact_sheet(cells: Sequence[Cell], title: str) -> Image.Image:
    """Return all cells on one sheet, in rows, under a title."""
    rows = -(-len(cells) // COLUMNS)
    header = 2 * LINE_HEIGHT + MARGIN
    sheet = Image.new("RGB", (COLUMNS * CELL[0] + MARGIN, rows * CELL[1] + header), WHITE)
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, MARGIN), title, BLACK, ImageFont.load_default(FONT_SIZE + 3))
    for number, cell in enumerate(cells):
        row, column = divmod(number, COLUMNS)
        _paste(sheet, pen, cell, (MARGIN + column * CELL[0], header + row * CELL[1]))
    return sheet


def _paste(sheet: Image.Image, pen: ImageDraw.ImageDraw, cell: Cell, corner: tuple[int, int]) -> None:
    x, y = corner
    width, height = cell.image.size
    enlarged = cell.image.resize((width * SCALE, height * SCALE), Image.Resampling.NEAREST)
    sheet.paste(enlarged, corner)
    pen.rectangle((x - 1, y - 1, x + enlarged.width, y + enlarged.height), outline=GREY if cell.correct else RED)
    if cell.input_image is not None:
        left = x + enlarged.width + MARGIN
        sheet.paste(cell.input_image.resize(INPUT_SIZE), (left, y + LINE_HEIGHT))
        pen.text((left, y), "from", GREY, ImageFont.load_default(FONT_SIZE))
    lines = [(line, BLACK) for line in textwrap.wrap(cell.prompt, LINE_CHARS)]
    lines.append((cell.details, GREY))
    if not cell.correct:
        lines.append(("does not show its prompt", RED))
    for number, (line, colour) in enumerate(lines):
        top = y + enlarged.height + 4 + number * LINE_HEIGHT
        pen.text((x, top), line, colour, ImageFont.load_default(FONT_SIZE))
