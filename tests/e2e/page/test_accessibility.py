"""No view has a serious or critical violation of axe-core's rules: wide and narrow, light and dark."""

from __future__ import annotations

import re
from typing import Any

import pytest
from harness.axe import check
from playwright.sync_api import Page, Route, expect

WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
VIEWS = (
    ("Now", "", ".tiles"),
    ("Playground", "#/playground", "textarea"),
    ("Playground", f"#/playground?after=job_{'0' * 26}", "[name=after]"),
    ("Jobs", "#/jobs", "tbody tr"),
    ("Jobs", "#/jobs?view=gallery", ".gallery li"),
    ("Jobs", "#/jobs?status=expired", ".empty"),
    ("Groups", "#/groups", "main .panel.batch"),
    ("Batches", "#/batches", "main .panel"),
    ("Dead letters", "#/dead-letters", ".letter"),
    ("Models", "#/models", ".model"),
    ("Tenants", "#/tenants?tenant=default&days=30", ".tenants-use tbody tr + tr"),
    ("Action log", "#/actions", ".actions-log"),
    ("Keys", "#/keys", "main .panel"),
)


@pytest.fixture(scope="module")
def full(waiting: Any, dead_letter: Any) -> Any:
    """The service without workers, with a job in every state that needs none, a batch and a pause."""
    waiting.client.post(f"/v1/jobs/{waiting.submit(prompt='a canceled circle', group='nightly')}/cancel")
    dead_letter("a prompt that ends its worker")
    for n in range(3):
        waiting.submit(prompt=f"a queued circle {n}", n=2, metadata={"order": str(n)})
    line = '{"custom_id": "1", "method": "POST", "url": "/v1/jobs", "body": {"model": "demo", "prompt": "x"}}'
    file = waiting.client.post("/v1/files", files={"file": ("in.jsonl", line)}, data={"purpose": "batch"}).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/jobs", "completion_window": "24h"}
    assert waiting.client.post("/v1/batches", json=batch).status_code == 200
    assert waiting.client.put("/v1/pauses/tenants/acme", json={"reason": "a check"}).status_code == 200
    return waiting


@pytest.fixture(scope="module")
def views(full: Any) -> tuple[tuple[str, str, str], ...]:
    """All views, with that of a job in a graph of six columns."""
    job_id = full.submit(prompt="the first of a graph")
    for _ in range(5):
        job_id = full.submit(prompt="one after another", after=[job_id])
    return (*VIEWS, ("Job", f"#/jobs/{job_id}", ".graph li"))


def test_every_view_is_accessible(open_page: Any, full: Any, views: Any) -> None:
    page = open_page(full.url)
    for name, address, ready in views:
        page.set_viewport_size(WIDE)
        page.goto(f"{full.url}/{address}")
        expect(page.get_by_role("heading", level=1, name=name)).to_be_visible()
        expect(page.locator(ready).first).to_be_visible()
        check(page, "light")
        page.set_viewport_size(NARROW)
        check(page, "dark")


WIDTHS = (1400, 1024, 390)
OVERFLOW = """() => {
    const scrolls = one => one && (/auto|scroll/.test(getComputedStyle(one).overflowX) || scrolls(one.parentElement));
    const out = [...document.querySelectorAll("body *")].filter(one => {
        const { right, width } = one.getBoundingClientRect();
        return width > 0 && right > innerWidth + 1 && !scrolls(one.closest("table, pre, .graph"));
    });
    return [document.documentElement.scrollWidth - innerWidth, out.slice(0, 5).map(one => one.outerHTML.slice(0, 120))];
}"""


def _tasks(page: Page) -> list[str]:
    """Return the tasks of the playground, none elsewhere."""
    field = page.get_by_role("combobox", name="Task")
    return [] if field.count() == 0 else field.locator("option").evaluate_all("all => all.map(one => one.value)")


def test_no_view_is_wider_than_its_window(open_page: Any, full: Any, views: Any) -> None:
    page = open_page(full.url)
    faults = []
    for name, address, ready in views:
        page.goto(f"{full.url}/{address}")
        expect(page.get_by_role("heading", level=1, name=name)).to_be_visible()
        expect(page.locator(ready).first).to_be_visible()
        for task in _tasks(page) or [""]:
            if task:
                page.get_by_role("combobox", name="Task").select_option(task)
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                over, elements = page.evaluate(OVERFLOW)
                if over > 0 or elements:
                    faults.append((name, task, width, over, elements))
    assert faults == []


LONG = "diffusers.pipelines.stable_diffusion.StableDiffusionPipelineOfAVeryLongName" * 2
TEXTS = ("prompt", "detail", "message", "host", "name", "model", "target")
WORKER = {
    **{"id": LONG, "host": LONG, "device": "cpu", "state": "ready", "worker_pool": "", "slots": 4, "free_slots": 4},
    **{"running_slots": 0, "running_jobs": 0, "models_bytes": 0, "models": [LONG, "demo"], "loaded": [LONG]},
    **{"loading": [], "kept": [], "forwards": 0, "forward_rows": 0, "busy_s": 0, "idle_while_queued_s": 0},
    "unavailable": {LONG: {"reason": LONG, "permanent": True, "retry_in_s": 0}},
}


def _longer(value: Any) -> Any:
    """Return a response with long texts, without a place to break them."""
    if isinstance(value, list):
        return [_longer(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: LONG if key in TEXTS and isinstance(text, str) else _longer(text) for key, text in value.items()}


def _lengthen(route: Route) -> None:
    if route.request.url.endswith("/v1/workers"):
        return route.fulfill(json={"object": "list", "data": [WORKER]})
    response = route.fetch()
    if "json" not in response.headers["content-type"]:
        return route.fulfill(response=response)
    return route.fulfill(response=response, json=_longer(response.json()))


def test_long_names_and_errors_fit_each_width(open_page: Any, full: Any, views: Any, dead_letter: Any) -> None:
    """Also on the page of a failed job."""
    failed = dead_letter("another prompt that ends its worker")
    page = open_page(full.url)
    page.route(re.compile("/(v1|page/graph)"), _lengthen)
    faults = []
    for name, address, ready in (*views, ("Job", f"#/jobs/{failed}", ".note.is-failed")):
        page.set_viewport_size({"width": WIDTHS[0], "height": 900})
        page.goto(f"{full.url}/{address}")
        expect(page.locator("h1")).to_contain_text(name)
        expect(page.locator(ready).first).to_be_visible()
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            over, elements = page.evaluate(OVERFLOW)
            if over > 0 or elements:
                faults.append((name, width, over, elements))
    assert faults == []


COVERED = """button => {
    const { left, top, width, height } = button.getBoundingClientRect();
    return !button.contains(document.elementFromPoint(left + width / 2, top + height / 2));
}"""


def test_the_tabs_of_a_phone_cover_no_button(open_page: Any, full: Any) -> None:
    page = open_page(full.url, "#/playground")
    page.set_viewport_size(NARROW)
    page.locator("textarea").fill("a circle")
    assert not page.get_by_role("button", name="Generate").evaluate(COVERED)


def _help(page: Page) -> None:
    page.keyboard.press("?")


def _confirmation(page: Page) -> None:
    page.get_by_role("button", name="Cancel all open").click()
    expect(page.get_by_role("dialog")).to_contain_text("jobs")


def _pause(page: Page) -> None:
    page.get_by_role("link", name="Now").click()
    page.get_by_role("button", name="Pause work").click()


def _limits(page: Page) -> None:
    page.get_by_role("link", name="Tenants").click()
    page.get_by_role("button", name="Limits of default").click()


def test_dialogs_are_accessible(open_page: Any, full: Any) -> None:
    page = open_page(full.url, "#/jobs")
    expect(page.locator("tbody tr").first).to_be_visible()
    for ask in (_help, _confirmation, _pause, _limits):
        ask(page)
        expect(page.get_by_role("dialog")).to_be_visible()
        check(page, "dark")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
