"""No view has a serious or critical violation of axe-core's rules: wide and narrow, light and dark."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
VIEWS = {
    "now": ("", ".tiles"),
    "playground": ("#/playground", "textarea"),
    "jobs": ("#/jobs", "tbody tr"),
    "gallery": ("#/jobs?view=gallery", ".gallery li"),
    "no jobs": ("#/jobs?status=expired", ".empty"),
    "batches": ("#/batches", "main .panel"),
    "dead letters": ("#/dead-letters", ".letter"),
    "models": ("#/models", ".model"),
    "tenants": ("#/tenants?tenant=default&days=30", ".tenants-use tbody tr + tr"),
    "action log": ("#/actions", ".actions-log"),
}


@pytest.fixture(scope="module")
def full(waiting: Any, dead_letter: Any) -> Any:
    """The service without workers, with a job in every state that needs none, a batch and a pause."""
    waiting.client.post(f"/v1/jobs/{waiting.submit(prompt='a canceled circle')}/cancel")
    dead_letter("a prompt that ends its worker")
    for n in range(3):
        waiting.submit(prompt=f"a queued circle {n}", n=2, metadata={"order": str(n)})
    line = '{"custom_id": "1", "method": "POST", "url": "/v1/jobs", "body": {"model": "demo", "prompt": "x"}}'
    file = waiting.client.post("/v1/files", files={"file": ("in.jsonl", line)}, data={"purpose": "batch"}).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/jobs", "completion_window": "24h"}
    assert waiting.client.post("/v1/batches", json=batch).status_code == 200
    assert waiting.client.put("/v1/pauses/tenants/acme", json={"reason": "a check"}).status_code == 200
    return waiting


def check(page: Page, *schemes: Literal["light", "dark"]) -> None:
    """Check a page in each colour scheme."""
    for scheme in schemes:
        # Without motion, colours are not checked half way through an animation.
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        violations = Axe().run(page).response["violations"]
        serious = [
            (one["id"], [(node["html"][:160], node["failureSummary"][:300]) for node in one["nodes"][:3]])
            for one in violations
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == [], scheme


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_accessible(open_page: Any, full: Any, view: str) -> None:
    address, ready = VIEWS[view]
    page = open_page(full.url, address, viewport=WIDE)
    expect(page.locator(ready).first).to_be_visible()
    check(page, "light")
    page.set_viewport_size(NARROW)
    check(page, "dark")


def test_a_finished_job_its_image_and_a_running_one_are_accessible(open_page: Any, working: Any) -> None:
    done = working.submit(prompt="a red circle", steps=4)
    working.finish(done)
    running = working.submit(prompt="a blue circle", steps=100, n=4)
    page = open_page(working.url)
    expect(page.locator(".run").first).to_be_visible()
    check(page, "light", "dark")
    page.goto(f"{working.url}/#/jobs/{done}")
    expect(page.locator(".job-head")).to_be_visible()
    check(page, "light", "dark")
    page.get_by_role("button", name="Enlarge").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    check(page, "light", "dark")
    working.client.post(f"/v1/jobs/{running}/cancel")


def _help(page: Page) -> None:
    page.keyboard.press("?")


def _confirmation(page: Page) -> None:
    page.get_by_role("button", name="Cancel all open").click()
    expect(page.get_by_role("dialog")).to_contain_text("jobs")


def _pause(page: Page) -> None:
    page.get_by_role("link", name="Now").click()
    page.get_by_role("button", name="Pause work").click()


def test_dialogs_are_accessible(open_page: Any, full: Any) -> None:
    page = open_page(full.url, "#/jobs")
    expect(page.locator("tbody tr").first).to_be_visible()
    for ask in (_help, _confirmation, _pause):
        ask(page)
        expect(page.get_by_role("dialog")).to_be_visible()
        check(page, "dark")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)


def test_the_question_for_a_key_is_accessible(open_page: Any, keyed: Any) -> None:
    page = open_page(keyed.url)
    expect(page.get_by_label("API key")).to_be_visible()
    check(page, "light")
