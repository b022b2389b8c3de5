"""The whole grid, in the order of the page."""

from __future__ import annotations

from parity import images, modular, modular_videos, unlisted, videos
from parity.cells import Cell

GRID: tuple[Cell, ...] = (*images.CELLS, *modular.CELLS, *modular_videos.CELLS, *videos.CELLS, *unlisted.CELLS)
