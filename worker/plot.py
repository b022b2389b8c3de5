"""Curves as an SVG picture, written by hand: one needs no plotting library for lines and dots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 50
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")


def curves_svg(title: str, curves: Mapping[str, Mapping[int, float]]) -> str:
    """Return milliseconds per picture by rows, a line for each of `curves` (name to seconds per forward by rows)."""
    shown = {name: {rows: 1000 * curve[rows] / rows for rows in sorted(curve)} for name, curve in curves.items()}
    counts = sorted({rows for curve in shown.values() for rows in curve}) or [1]
    top = _round_up(max((most for curve in shown.values() for most in curve.values()), default=1.0))
    steps = max(1, counts[-1].bit_length() - 1)

    def x(rows: int) -> float:  # by doublings: that is how rows are measured
        return LEFT + math.log2(rows) / max(1.0, math.log2(counts[-1]), steps) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, title, 14),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "rows of a forward", 12, "middle"),
        _text(LEFT, TOP - 4, "ms per picture and step", 11),
    ]
    for tick in range(5):
        value = top * tick / 4
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y(value) + 4, f"{value:g}", 11, "end"))
    parts += [_text(x(rows), HEIGHT - BOTTOM + 18, str(rows), 11, "middle") for rows in counts]
    for at, (name, curve) in enumerate(shown.items()):
        colour = COLOURS[at % len(COLOURS)]
        points = [(x(rows), y(value)) for rows, value in curve.items()]
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for across, down in points]
        parts.append(_text(WIDTH - RIGHT + 14, TOP + 16 + 18 * at, name, 12, fill=colour))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, words: str, size: int, anchor: str = "start", *, fill: str = "#222") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {where} font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'


def _round_up(value: float) -> float:
    """Return the next number of the form 1, 2, 4 or 8 times a power of ten, so that quarters of it are short."""
    power: float = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(power * digit for digit in (1, 2, 4, 8, 10, 20) if power * digit >= value)
