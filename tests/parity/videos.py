"""The rows of the video families."""

from __future__ import annotations

from parity.cells import Cell

CELLS: tuple[Cell, ...] = ()
