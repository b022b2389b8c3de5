"""The whole grid, in the order of the page."""

from __future__ import annotations

from parity import images, modular, unlisted, videos
from parity.cells import Cell

GRID: tuple[Cell, ...] = (*images.CELLS, *modular.CELLS, *videos.CELLS, *unlisted.CELLS)
