"""The whole grid, in the order of the page."""

from __future__ import annotations

from parity import images, unlisted, videos
from parity.cells import Cell

GRID: tuple[Cell, ...] = (*images.CELLS, *videos.CELLS, *unlisted.CELLS)
