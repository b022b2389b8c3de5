"""The contact sheet: every picture with its prompt below it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

COLUMNS = 8
CELL = (216, 212)
SCALE = 2
MARGIN = 8
START_SIZE = (60, 60)
LINE_CHARS, LINE_HEIGHT, FONT_SIZE = 34, 15, 12
PAPER, INK, FAINT, WRONG = (255, 255, 255), (20, 20, 20), (110, 110, 110), (200, 0, 0)


@dataclass(frozen=True)
class Cell:
    """One picture, what was asked for, and whether it shows that; `start` is what it was made from."""

    picture: Image.Image
    prompt: str
    details: str
    fits: bool
    start: Image.Image | None = None


def contact_sheet(cells: Sequence[Cell], title: str) -> Image.Image:
    """Return all cells on one sheet, in rows, under a title."""
    rows = -(-len(cells) // COLUMNS)
    header = 2 * LINE_HEIGHT + MARGIN
    sheet = Image.new("RGB", (COLUMNS * CELL[0] + MARGIN, rows * CELL[1] + header), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, MARGIN), title, INK, ImageFont.load_default(FONT_SIZE + 3))
    for number, cell in enumerate(cells):
        row, column = divmod(number, COLUMNS)
        _paste(sheet, pen, cell, (MARGIN + column * CELL[0], header + row * CELL[1]))
    return sheet


def _paste(sheet: Image.Image, pen: ImageDraw.ImageDraw, cell: Cell, corner: tuple[int, int]) -> None:
    x, y = corner
    width, height = cell.picture.size
    shown = cell.picture.resize((width * SCALE, height * SCALE), Image.Resampling.NEAREST)
    sheet.paste(shown, corner)
    pen.rectangle((x - 1, y - 1, x + shown.width, y + shown.height), outline=FAINT if cell.fits else WRONG)
    if cell.start is not None:
        beside = x + shown.width + MARGIN
        sheet.paste(cell.start.resize(START_SIZE), (beside, y + LINE_HEIGHT))
        pen.text((beside, y), "from", FAINT, ImageFont.load_default(FONT_SIZE))
    lines = [(line, INK) for line in textwrap.wrap(cell.prompt, LINE_CHARS)]
    lines.append((cell.details, FAINT))
    if not cell.fits:
        lines.append(("does not fit its prompt", WRONG))
    for number, (line, colour) in enumerate(lines):
        below = y + shown.height + 4 + number * LINE_HEIGHT
        pen.text((x, below), line, colour, ImageFont.load_default(FONT_SIZE))
