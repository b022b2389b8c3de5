"""Plots as SVG text, with matplotlib: the optional extra `plot`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT, PANEL_HEIGHT = 6.4, 4.0, 1.9  # inches, at 72 points


@dataclass(frozen=True)
class Panel:
    """Step series on one axis: by name, points of (seconds, value)."""

    label: str
    series: Mapping[str, Sequence[tuple[float, float]]]


def require_matplotlib() -> None:
    """Raise `ConfigurationError` if matplotlib is not installed; call it before long work that ends in a plot."""
    try:
        import matplotlib  # noqa: F401 - imported only by commands that plot
    except ImportError as error:
        raise ConfigurationError("plotting needs matplotlib: pip install 'fusequeue-server[plot]'") from error


def cost_curves_svg(title: str, curves: Mapping[str, Mapping[int, float]]) -> str:
    """Return a plot of milliseconds per image and step by rows; `curves` holds seconds per forward by rows."""
    figure = _figure(HEIGHT)
    axes = figure.add_subplot(title=title, xlabel="rows of a forward", ylabel="ms per image and step")
    for name, curve in curves.items():
        rows = sorted(curve)
        axes.plot(rows, [1000 * curve[count] / count for count in rows], marker="o", label=name, gid=f"curve {name}")
    counts = sorted({rows for curve in curves.values() for rows in curve}) or [1]
    axes.set_xscale("log", base=2)  # rows are measured by doubling
    axes.set_xticks(counts, labels=[str(count) for count in counts], minor=False)
    return _svg(figure, legend=bool(curves))


def timeline_svg(title: str, panels: Sequence[Panel]) -> str:
    """Return step plots over the same seconds, one panel below the other."""
    figure = _figure(1 + PANEL_HEIGHT * len(panels))
    figure.suptitle(title)
    end = max((at for panel in panels for points in panel.series.values() for at, _ in points), default=0.0)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(len(panels), 1, number, ylabel=panel.label, xlim=(0, end or 1))
        for name, points in panel.series.items():
            steps = [*points, (end, points[-1][1])] if points else []
            axes.step([at for at, _ in steps], [value for _, value in steps], where="post", label=name)
        if number == len(panels):
            axes.set_xlabel("seconds")
    return _svg(figure, legend=True)


def _figure(height: float) -> Figure:
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _svg(figure: Figure, *, legend: bool) -> str:
    import matplotlib

    for axes in figure.axes:
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.4)
        if legend:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    text = io.StringIO()
    # Text stays text, and the same data gives the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fusequeue"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
