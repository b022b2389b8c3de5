"""Plots as SVG."""

from __future__ import annotations

import builtins
import math
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from shared.errors import ConfigurationError
from shared.runtime.plots import Panel, cost_curves_svg, require_matplotlib, timeline_svg

SVG = "{http://www.w3.org/2000/svg}"


def curve_groups(svg: str) -> list[ElementTree.Element]:
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    return [group for group in groups if group.attrib.get("id", "").startswith("curve ")]


def words(svg: str) -> set[str | None]:
    return {text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")}


def test_cost_curves_have_one_line_per_model_and_fall_with_cheaper_images() -> None:
    svg = cost_curves_svg("a < b", {"x": {1: 0.1, 2: 0.1, 4: 0.1}, "y & z": {1: 0.05}})
    lines = curve_groups(svg)
    assert len(lines) == 2
    path = next(lines[0].iter(f"{SVG}path")).attrib["d"]
    heights = [float(y) for _, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)]
    assert len(heights) == 3
    assert heights == sorted(heights), "SVG counts from the top"
    assert {"a < b", "x", "y & z", "1", "2", "4"} <= words(svg)


@pytest.mark.parametrize("curves", [{}, {"x": {1: 0.0}}, {"x": {1: 1e-6, 3: 2e-6}}])
def test_cost_curves_stay_within_the_frame(curves: dict[str, dict[int, float]]) -> None:
    svg = cost_curves_svg("t", curves)
    height = float(ElementTree.fromstring(svg).attrib["viewBox"].split()[3])
    markers = [marker for group in curve_groups(svg) for marker in group.iter(f"{SVG}use")]
    assert len(markers) == sum(map(len, curves.values()))
    for marker in markers:
        assert math.isfinite(float(marker.attrib["x"]))
        assert 0 <= float(marker.attrib["y"]) <= height


def test_timelines_name_all_series_and_are_reproducible() -> None:
    panels = [
        Panel("jobs", {"queued": [(0.0, 3.0), (2.0, 0.0)]}),
        Panel("workers", {"ready": [], "busy": [(1.0, 1.0)]}),
    ]
    svg = timeline_svg("pool", panels)
    assert {"pool", "jobs", "workers", "queued", "ready", "busy", "seconds"} <= words(svg)
    assert svg == timeline_svg("pool", panels)


def test_missing_matplotlib_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match=re.escape("pip install 'fusequeue-server[plot]'")):
        require_matplotlib()
