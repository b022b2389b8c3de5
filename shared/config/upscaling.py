"""The sides of upscaled images and videos, as pipelines round them.

A factor that is no integer enlarges the source before its latents are: 2.25 is 1.125 and then 2.
"""

from __future__ import annotations


def upscaled_side(side: int, factor: float, cell: int) -> int:
    """Return the side of a result; `cell` pixels of the source's side have one value of its latents."""
    whole = int(factor)
    return round(side // cell * (factor / whole)) * cell * whole


def source_side(side: int, factor: float, cell: int) -> int:
    """Return the largest side of a source whose result has at most `side` pixels."""
    cells = int(side / factor) // cell + 1
    while upscaled_side(cells * cell, factor, cell) > side:
        cells -= 1
    return cells * cell


def rounded_side(side: int, factor: float, cell: int) -> int:
    """Return the longest side up to `side` that a result can have."""
    return upscaled_side(source_side(side, factor, cell), factor, cell)
