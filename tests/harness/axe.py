"""axe-core in a page."""

from __future__ import annotations

from typing import Literal

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page

SERIOUS = """async () => {
    const { violations } = await axe.run({ resultTypes: ["violations"] });
    return violations.filter(one => ["serious", "critical"].includes(one.impact)).map(one => [
        one.id, one.nodes.slice(0, 3).map(node => [node.html.slice(0, 160), node.failureSummary.slice(0, 300)]),
    ]);
}"""
"""Returns only what is asserted: a whole result is 50 kB, and takes as long as finding it."""


def check(page: Page, *schemes: Literal["light", "dark"]) -> None:
    """Check a page in each colour scheme."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    for scheme in schemes:
        # Without motion, colours are not checked half way through an animation.
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        assert page.evaluate(SERIOUS) == [], (page.url, scheme)
