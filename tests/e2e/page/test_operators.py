"""What operators hold back and read in a browser: pauses, the action log, and what forwards cost."""

from __future__ import annotations

from typing import Any

import pytest
from harness.waiting import wait_until
from playwright.sync_api import Page, expect


def pause_banner(page: Page) -> Any:
    return page.get_by_role("region", name="Pauses")


@pytest.fixture
def resumed(waiting: Any) -> Any:
    """The service without workers, and nothing paused after a test."""
    yield waiting
    for pause in waiting.read("/v1/pauses")["data"]:
        kind = {"all": "all", "model": f"models/{pause['name']}", "tenant": f"tenants/{pause['name']}"}[pause["kind"]]
        waiting.client.delete(f"/v1/pauses/{kind}")


def test_a_model_is_paused_with_a_reason_and_resumed_on_another_view(open_page: Any, resumed: Any) -> None:
    job_id = resumed.submit(prompt="a circle that waits")
    page = open_page(resumed.url, "#/models")
    page.get_by_role("article", name="Model demo").get_by_role("button", name="Pause").click()
    dialog = page.get_by_role("dialog", name="Pause model demo?")
    assert resumed.read("/v1/pauses")["data"] == [], "nothing before the confirmation"
    dialog.get_by_label("Reason").fill("a new driver")
    page.keyboard.press("Enter")
    expect(pause_banner(page)).to_contain_text("Paused: model demo · a new driver")
    (pause,) = resumed.read("/v1/pauses")["data"]
    assert (pause["kind"], pause["name"], pause["reason"]) == ("model", "demo", "a new driver")
    page.goto(f"{resumed.url}/#/jobs/{job_id}")
    expect(page.get_by_text("An operator has paused its model")).to_be_visible()
    page.goto(f"{resumed.url}/#/now")
    expect(page.get_by_role("row").filter(has_text="demo")).to_contain_text("paused")
    page.get_by_role("button", name="Resume model demo").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume", exact=True).click()
    expect(pause_banner(page)).to_have_count(0)
    assert resumed.read("/v1/pauses")["data"] == []
    resumed.client.post(f"/v1/jobs/{job_id}/cancel")


def test_now_pauses_everything_a_tenant_or_a_model(open_page: Any, resumed: Any) -> None:
    page = open_page(resumed.url)
    for what, name in (("everything", ""), ("a tenant", "acme"), ("a model", "demo")):
        page.get_by_role("button", name="Pause work").click()
        dialog = page.get_by_role("dialog", name="Pause work?")
        dialog.get_by_label("What").select_option(label=what)
        if what == "a tenant":
            expect(dialog.get_by_role("button", name="Pause", exact=False).last).to_be_disabled()
            dialog.get_by_role("textbox", name="Tenant").fill(name)
        dialog.get_by_role("button", name=f"Pause {name or 'everything'}").click()
        expect(pause_banner(page)).to_contain_text(f"Paused: {what.removeprefix('a ')} {name}".strip())
    assert sorted(pause["name"] for pause in resumed.read("/v1/pauses")["data"]) == ["", "acme", "demo"]


def test_a_model_is_preselected_also_when_the_models_arrive_late(open_page: Any, resumed: Any, hold: Any) -> None:
    page = open_page(resumed.url)
    held = hold(page, "**/v1/models")
    page.get_by_role("button", name="Pause work").click()
    dialog = page.get_by_role("dialog", name="Pause work?")
    dialog.get_by_label("What").select_option(label="a model")
    expect(dialog.get_by_role("textbox", name="Model")).to_be_visible()
    wait_until(lambda: page.evaluate("1") and held, "the models are requested")
    held[0].continue_()
    expect(dialog.get_by_role("button", name="Pause demo")).to_be_enabled()


def test_a_pause_that_is_refused_says_why_and_keeps_its_dialog(open_page: Any, resumed: Any) -> None:
    page = open_page(resumed.url)
    page.get_by_role("button", name="Pause work").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("What").select_option(label="a tenant")
    dialog.get_by_role("textbox", name="Tenant").fill("no tenant")
    dialog.get_by_role("button", name="Pause no tenant").click()
    expect(dialog.get_by_role("alert")).to_contain_text("tenant")


def test_the_action_log_shows_what_operators_did_page_by_page(open_page: Any, resumed: Any) -> None:
    for number in range(60):
        resumed.client.put("/v1/pauses/models/demo", json={"reason": f"reason {number}"})
    page = open_page(resumed.url, "#/actions")
    rows = page.locator(".actions-log tbody tr")
    expect(rows).to_have_count(50)
    expect(rows.first).to_contain_text("reason 59")
    expect(rows.first).to_contain_text("model demo")
    page.get_by_role("button", name="Older").click()
    expect(page.get_by_role("cell", name="reason 0", exact=True)).to_be_visible()
    page.get_by_role("button", name="Newest").click()
    expect(rows.first).to_contain_text("reason 59")


def test_a_model_is_pinned_and_unpinned_after_a_confirmation(open_page: Any, resumed: Any) -> None:
    page = open_page(resumed.url, "#/models")
    buttons = page.get_by_role("article", name="Model demo").get_by_role("group", name="Memory of workers")
    for action, actions in (("Pin", ["pin"]), ("Unpin", [])):
        before = resumed.read("/v1/model-orders")["data"]
        buttons.get_by_role("button", name=action, exact=True).click()
        dialog = page.get_by_role("dialog", name=f"{action} demo?")
        assert resumed.read("/v1/model-orders")["data"] == before, "nothing before the confirmation"
        dialog.get_by_role("button", name=action, exact=True).click()
        expect(dialog).to_have_count(0)
        assert [one["action"] for one in resumed.read("/v1/model-orders")["data"]] == actions
