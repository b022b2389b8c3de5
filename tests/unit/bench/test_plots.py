"""Plots of benchmarks: valid SVG, with every point inside of the axes."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from bench.common.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Line, line_plot

SVG = "{http://www.w3.org/2000/svg}"


def test_every_point_is_inside_of_the_axes_and_every_line_named() -> None:
    lines = [Line("a < b", [(0, 0), (7, 31)]), Line("other", [(3.5, 96.4)])]
    root = ElementTree.fromstring(line_plot(lines, "steps", "share, %"))
    points = [(float(one.get("cx", -1)), float(one.get("cy", -1))) for one in root.iter(f"{SVG}circle")]
    assert len(points) == 3
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= HEIGHT - BOTTOM for x, y in points)
    assert points[0] == (LEFT, HEIGHT - BOTTOM)
    assert points[1][0] > points[2][0], "further to the right"
    assert points[1][1] > points[2][1], "and lower, as y grows downwards"
    assert {"a < b", "other", "steps", "share, %"} <= {one.text for one in root.iter(f"{SVG}text")}
