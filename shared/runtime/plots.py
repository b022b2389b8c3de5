"""Curves and steps over time as SVG pictures, written by hand: one needs no plotting library for lines and dots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 50
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
PANEL_HEIGHT, GAP = 150, 40


@dataclass(frozen=True)
class Panel:
    """Counts over the same time: for each of `series` (by name) its changes, as seconds and the count from then on."""

    label: str
    series: Mapping[str, Sequence[tuple[float, float]]]


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
        *_sheet(title, HEIGHT),
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


def times_svg(title: str, panels: Sequence[Panel]) -> str:
    """Return counts over seconds as steps, the panels one below the other on one axis of time."""
    height = TOP + len(panels) * (PANEL_HEIGHT + GAP) + 10
    last = max((at for panel in panels for points in panel.series.values() for at, _ in points), default=0.0)
    span = _round_up(last) if last > 0 else 1.0
    step = next(span / pieces for pieces in (8, 4) if span / pieces * 4 > last / 2)
    ticks = [tick * step for tick in range(9) if tick * step <= last] if last > 0 else [0.0]
    parts = _sheet(title, height)
    for at, panel in enumerate(panels):
        top = TOP + at * (PANEL_HEIGHT + GAP)
        parts += _panel(panel, top, last or 1.0)
        parts += [
            _text(_across(tick, last or 1.0), top + PANEL_HEIGHT + 16, f"{tick:g}", 11, "middle") for tick in ticks
        ]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 8, "seconds", 12, "middle"))
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, top: float, last: float) -> list[str]:
    most = max((count for points in panel.series.values() for _, count in points), default=0.0)
    ceiling = most if 0 < most <= 4 else _round_up(most) if most > 0 else 1.0
    lines = int(ceiling) if ceiling <= 4 and ceiling == int(ceiling) else 4

    def y(count: float) -> float:
        return top + PANEL_HEIGHT - count / ceiling * (PANEL_HEIGHT - 16)

    parts = [_text(LEFT, top + 8, panel.label, 11)]
    for tick in range(lines + 1):
        count = ceiling * tick / lines
        parts.append(f'<path d="M{LEFT} {y(count):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y(count) + 4, f"{count:g}", 11, "end"))
    for at, (name, points) in enumerate(panel.series.items()):
        colour, width = COLOURS[at % len(COLOURS)], 2 * (len(panel.series) - at)  # lines on one another are all seen
        if points:
            drawn = f"M{_across(points[0][0], last):.1f} {y(points[0][1]):.1f}"
            drawn += "".join(f"H{_across(when, last):.1f}V{y(count):.1f}" for when, count in points[1:])
            drawn += f"H{WIDTH - RIGHT}"
            parts.append(f'<path d="{drawn}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(_text(WIDTH - RIGHT + 14, top + 24 + 18 * at, name, 12, fill=colour))
    return parts


def _across(seconds: float, last: float) -> float:
    return LEFT + seconds / last * (WIDTH - LEFT - RIGHT)


def _sheet(title: str, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 24, title, 14),
    ]


def _text(x: float, y: float, words: str, size: int, anchor: str = "start", *, fill: str = "#222") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {where} font-size="{size}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'


def _round_up(value: float) -> float:
    """Return the next number of the form 1, 2, 4 or 8 times a power of ten, so that quarters of it are short."""
    power: float = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(power * digit for digit in (1, 2, 4, 8, 10, 20) if power * digit >= value)
