"""Plots of a few lines, as SVG without a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#555555", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 20, 52


@dataclass(frozen=True)
class Line:
    """A line of a plot: its points (x, y), in order of x."""

    name: str
    points: Sequence[tuple[float, float]]


def line_plot(lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """Return an SVG of lines with points; the axes begin at 0."""
    right = _nice(max(x for line in lines for x, _ in line.points))
    top = _nice(max(y for line in lines for _, y in line.points))

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (WIDTH - LEFT - RIGHT) * x / right, (HEIGHT - TOP - BOTTOM) * y / top
        return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for at in range(6):
        x, y = place(right * at / 5, top * at / 5)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{top * at / 5:g}", "end"))
        parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{right * at / 5:g}", "middle"))
    parts.append(_text(LEFT + (WIDTH - LEFT - RIGHT) / 2, HEIGHT - 10, x_label, "middle"))
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    parts.append(f'<g transform="rotate(-90 16 {middle})">{_text(16, middle, y_label, "middle")}</g>')
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        placed = [place(*point) for point in line.points]
        path = " ".join(f"{x},{y}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>' for x, y in placed]
        below = HEIGHT - BOTTOM - 14 - 18 * (len(lines) - 1 - number)
        parts.append(f'<rect x="{WIDTH - 190}" y="{below - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(_text(WIDTH - 170, below - 3, line.name, "start"))
    return "\n".join((*parts, "</svg>")) + "\n"


def _nice(value: float) -> float:
    """Return a limit of an axis: a value at or above, of which a fifth is short to write."""
    step = next(one for one in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000) if 5 * one >= value)
    return 5.0 * step


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="13" text-anchor="{anchor}">{escape(text)}</text>'
