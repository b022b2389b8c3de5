"""Jobs that run and have run in a browser: their steps, timeline, images, cost and use."""

from __future__ import annotations

import re
from typing import Any

from harness.axe import check
from harness.waiting import wait_until
from playwright.sync_api import expect


def cancel(stack: Any, job_id: str) -> None:
    """Cancel a job and wait for its end: it is no batch mate of the next test's jobs."""
    stack.client.post(f"/v1/jobs/{job_id}/cancel")
    stack.finish(job_id)


def measured_rows(stack: Any) -> set[int]:
    """Return the numbers of rows in the saved cost curves."""
    return {point["rows"] for curve in stack.read("/v1/cost-curves")["data"] for point in curve["points"]}


def test_now_shows_a_running_job_with_its_step_and_cancels_it(open_page: Any, working: Any) -> None:
    page = open_page(working.url)
    expect(page.get_by_role("img", name="0 of 16 slots are in use")).to_be_visible()
    job_id, mate = [working.submit(prompt=f"a {colour} circle", steps=100, n=8) for colour in ("red", "blue")]
    row = page.locator(".run").filter(has_text=job_id[-6:])
    expect(row).to_be_visible()
    expect(row).to_contain_text(re.compile(r"step \d+ of 800"))
    expect(page.get_by_role("img", name="16 of 16 slots are in use")).to_be_visible()
    row.get_by_role("button", name=f"Cancel {job_id}").click()
    assert working.finish(job_id)["status"] == "canceled"
    expect(row).to_have_count(0)
    assert working.job(mate)["status"] != "canceled"
    cancel(working, mate)


def test_a_job_s_page_has_its_timeline_events_and_json(open_page: Any, working: Any) -> None:
    job_id = working.submit(prompt="a green ring on a white ground", steps=12, seed=5, metadata={"order": "12"})
    page = open_page(working.url, f"#/jobs/{job_id}")
    expect(page.locator(".job-head .badge")).to_have_text("succeeded")
    expect(page.get_by_role("img", name=re.compile("^Timeline: queued .*, forwards .*, upload "))).to_be_visible()
    expect(page.locator(".events")).to_contain_text("succeeded")
    expect(page.get_by_role("button", name=re.compile("^Enlarge"))).to_be_visible()
    page.get_by_text("Raw JSON").click()
    expect(page.locator(".raw code")).to_contain_text(f'"id": "{job_id}"')
    page.get_by_role("link", name="order=12").click()
    expect(page.locator("tbody tr")).to_have_count(1)


def test_a_model_shows_its_cost_by_rows_and_a_job_the_rows_of_its_forwards(open_page: Any, working: Any) -> None:
    job_id = working.submit(prompt="a red ring", steps=20, n=2)
    working.finish(job_id)
    page = open_page(working.url, f"#/jobs/{job_id}")
    expect(page.get_by_role("img", name="Rows of its forwards in order: 20 of 2")).to_be_visible()
    wait_until(lambda: 2 in measured_rows(working), "the worker saves its curve")
    page.goto(f"{working.url}/#/models")
    costs = page.get_by_role("region", name="Batch cost curve")
    expect(costs.get_by_role("img", name=re.compile(r"^Cost of a forward at 64x64 on cpu: .*2 rows"))).to_be_visible()
    expect(costs).to_contain_text("Efficient up to")


def test_tenants_show_their_usage_by_model_and_their_limits(open_page: Any, working: Any) -> None:
    """With the mouse and with the keyboard; the address keeps the period and the open tenant."""
    job_id = working.submit(prompt="a red circle", steps=4, n=2)
    working.finish(job_id)
    (used,) = working.read("/v1/usage?group_by=tenant")["data"]
    page = open_page(working.url, "#/tenants")
    row = page.locator(".tenants-use tbody tr").first
    expect(row).to_contain_text("default")
    assert used["images"] >= 2
    expect(row.get_by_role("cell").nth(1)).to_have_text(str(used["images"]))
    expect(row).to_contain_text("of 50,000")
    models = page.get_by_role("button", name="Models of default")
    expect(models).to_have_attribute("aria-expanded", "false")
    models.click()
    expect(page.locator(".of-model")).to_contain_text("demo")
    page.get_by_role("button", name="30 days").click()
    expect(page.get_by_role("button", name="30 days")).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".of-model")).to_contain_text("demo")
    page.reload()
    expect(page.locator(".of-model")).to_contain_text("demo")
    page.get_by_role("button", name="Models of default").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".of-model")).to_have_count(0)
    page.get_by_label("Tenant", exact=True).fill("other")
    page.keyboard.press("Enter")
    expect(page.get_by_text("No tenant begins so.")).to_be_visible()


def test_a_finished_job_its_image_and_a_running_one_are_accessible(open_page: Any, working: Any) -> None:
    done = working.submit(prompt="a red circle", steps=4)
    working.finish(done)
    running = working.submit(prompt="a blue circle", steps=100, n=4)
    page = open_page(working.url)
    expect(page.locator(".run").first).to_be_visible()
    check(page, "light", "dark")
    cancel(working, running)
    page.goto(f"{working.url}/#/jobs/{done}")
    expect(page.locator(".job-head")).to_be_visible()
    check(page, "light", "dark")
    page.get_by_role("button", name="Enlarge").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    check(page, "light", "dark")
