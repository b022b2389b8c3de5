"""`python -m bench.queue.page`: first paint and interactions of the page with 10,000 queued jobs.

Starts `fusequeue up` without a worker, queues the jobs, and drives a headless Chromium. The browser measures each
interaction itself (Event Timing): from the click or key to the next paint, in steps of 8 ms. `--json FILE` saves the
figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

from bench.common import record
from bench.over_http import up

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
PER_REQUEST = 5_000
OBSERVED = """
window.interactions = [];
new PerformanceObserver(list => {
    for (const entry of list.getEntries()) if (entry.interactionId) window.interactions.push(entry.duration);
}).observe({ type: "event", durationThreshold: 16, buffered: true });
"""
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=4, help="of each interaction, and of what undoes it")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None:
        parser.error("no Chromium on the PATH: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, up(Path(folder), "--workers", "0") as url:
        queue_jobs(url, args.jobs)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium)
            figures = {"jobs": args.jobs, **first_paint(browser, url, args.repeats), **interactions(browser, url, args)}
            figures["chromium"] = browser.version
            browser.close()
    print(json.dumps(figures, indent=1))
    if args.json:
        record.write(args.json, figures)


def queue_jobs(url: str, jobs: int) -> None:
    """Submit jobs of four signatures in bulk requests."""
    lines = [
        json.dumps({"model": "demo", "prompt": f"a red circle on a blue ground, number {n}", "width": 64 + 8 * (n % 4)})
        for n in range(jobs)
    ]
    with httpx.Client(base_url=url, timeout=300) as client:
        for start in range(0, jobs, PER_REQUEST):
            body = "\n".join(lines[start : start + PER_REQUEST])
            response = client.post("/v1/jobs:bulk", content=body, headers={"Content-Type": "application/x-ndjson"})
            if (accepted := response.text.count('"id"')) != body.count("\n") + 1:
                raise RuntimeError(f"{accepted} jobs were accepted: {response.text[:500]}")


def first_paint(browser: Browser, url: str, repeats: int) -> dict[str, Any]:
    """Return the milliseconds to the first paint with content, and to the first figures, with an empty cache."""
    paints, figures = [], []
    for _ in range(repeats):
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        page.locator(".tiles").wait_for()
        figures.append(page.evaluate("performance.now()"))
        paints.append(page.evaluate(PAINTED))
        context.close()
    return {"first_paint_ms": spread(paints), "first_figures_ms": spread(figures)}


def interactions(browser: Browser, url: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of each kind of interaction, and how many elements the largest view has."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.add_init_script(OBSERVED)
    page.goto(f"{url}/#/jobs")
    page.locator("tbody tr").first.wait_for()
    kinds: dict[str, Callable[[Page], None]] = {
        "select a job": lambda page: page.locator("tbody input").first.click(),
        "select all of a page": lambda page: page.locator("thead input").click(),
        "filter by state": lambda page: page.locator(".chip").first.click(),
        "table to gallery, or back": lambda page: page.keyboard.press("v"),
        "next job by key": lambda page: page.keyboard.press("j"),
        "open a job and return": open_job,
        "go to another view and return": other_view,
        "overview of keys": keys_overview,
    }
    found: dict[str, Any] = {}
    elements = 0
    for name, act in kinds.items():
        page.evaluate("window.interactions = []")
        for _ in range(2 * args.repeats):
            act(page)
            page.evaluate(TWO_FRAMES)
            elements = max(elements, page.evaluate("document.querySelectorAll('*').length"))
        # Those below 16 ms are not reported.
        found[name] = max(page.evaluate("window.interactions"), default=16)
    page.close()
    return {"longest_interaction_ms": found, "most_elements": elements}


def open_job(page: Page) -> None:
    page.locator("tbody tr .mono").first.click()
    page.locator(".job-head").wait_for()
    page.go_back()
    page.locator("tbody tr").first.wait_for()


def other_view(page: Page) -> None:
    page.get_by_role("link", name="Now").click()
    page.locator(".tiles").wait_for()
    page.get_by_role("link", name="Jobs", exact=False).first.click()
    page.locator("tbody tr").first.wait_for()


def keys_overview(page: Page) -> None:
    page.keyboard.press("?")
    page.locator("dialog").wait_for()
    page.keyboard.press("Escape")


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values)), "longest": round(max(values))}


if __name__ == "__main__":
    main()
