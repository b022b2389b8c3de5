"""The graph of a job: what it waits for, what waits for it, and what becomes of these while one looks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect


@pytest.fixture
def paused(working: Any) -> Iterator[Any]:
    """The service with a worker, whose jobs stay queued until the pause of their model ends."""
    working.client.put("/v1/pauses/models/demo", json={"reason": "so that they stay queued"}).raise_for_status()
    yield working
    working.client.delete("/v1/pauses/models/demo")  # unless the test has


def node(page: Page, prompt: str) -> Any:
    return page.locator(".graph li").filter(has_text=prompt)


def expect_ends(route: Route) -> None:
    """Return the graph, with queued jobs that are expected to end in 90 seconds."""
    response = route.fetch()
    graph = response.json()
    for job in graph["data"]:
        if job["queue"] is not None:
            job["queue"]["eta_s"] = 90
    route.fulfill(response=response, json=graph)


def place(page: Page, prompt: str) -> tuple[float, float]:
    box = node(page, prompt).bounding_box()
    assert box is not None
    return box["x"], box["y"]


def test_a_graph_has_columns_by_what_waits_and_follows_its_jobs(open_page: Any, paused: Any) -> None:
    """With links, which the keyboard reaches in the order of the columns, and a thumbnail of each job that is done.

    A queued job shows when it is expected to end.
    """
    first, other = [paused.submit(prompt=f"a {colour} circle", steps=2) for colour in ("red", "blue")]
    child = paused.submit(prompt="a ring after both", steps=2, after=[first, other])
    page = open_page(paused.url)
    page.route("**/page/graph*", expect_ends)
    page.goto(f"{paused.url}/#/jobs/{child}")
    expect(page.locator(".graph li")).to_have_count(3)
    expect(node(page, "ring").locator(".number")).to_contain_text("2 min")
    last = paused.submit(prompt="a cross at last", steps=2, after=[child])
    expect(page.locator(".graph li")).to_have_count(4)
    expect(page.get_by_text("It waits for 2 jobs to end.")).to_be_visible()
    assert place(page, "red circle")[0] == place(page, "blue circle")[0] < place(page, "ring")[0]
    assert place(page, "ring")[0] < place(page, "cross")[0]
    expect(page.locator(".graph-picture > svg path")).to_have_count(3)
    expect(node(page, "ring").get_by_role("link")).to_have_attribute("aria-current", "true")
    expect(node(page, "ring")).to_contain_text(re.compile(rf"after job_…({first[-6:]}|{other[-6:]}) and job_…"))
    node(page, "ring").get_by_role("link").focus()
    page.keyboard.press("Tab")
    expect(node(page, "cross").get_by_role("link")).to_be_focused()
    paused.client.delete("/v1/pauses/models/demo").raise_for_status()
    for prompt in ("red circle", "blue circle", "ring", "cross"):
        expect(node(page, prompt).locator(".badge")).to_have_text("succeeded")
        expect(node(page, prompt).locator("img")).to_be_visible()
    expect(page.locator(".graph .number")).to_have_count(0)
    page.keyboard.press("Enter")
    expect(page.locator(".job-id")).to_contain_text(last)
    expect(page.locator(".graph li")).to_have_count(4)
    alone = paused.submit(prompt="a circle without others", steps=2)
    page.goto(f"{paused.url}/#/jobs/{alone}")
    expect(page.locator(".job-head .badge")).to_have_text("succeeded")
    expect(page.locator(".graph")).to_have_count(0)


def test_a_cancel_says_first_what_fails_with_the_job(open_page: Any, paused: Any) -> None:
    """Not what is to run all the same; a job for which none waits is canceled at once."""
    first = paused.submit(prompt="a first circle")
    child = paused.submit(prompt="a second circle", after=[first])
    paused.submit(prompt="a third circle", after=[child])
    anyway = paused.submit(prompt="a report", after=[first], on_parent_failure="run")
    page = open_page(paused.url, f"#/jobs/{first}")
    expect(page.locator(".graph li")).to_have_count(4)
    page.get_by_role("button", name="Cancel", exact=True).click()
    dialog = page.get_by_role("dialog", name="Cancel this job?")
    expect(dialog).to_contain_text("2 jobs that wait for its result fail with it")
    dialog.get_by_role("button", name="Keep").click()
    assert paused.job(first)["status"] == "queued"
    page.get_by_role("button", name="Cancel", exact=True).click()
    dialog.get_by_role("button", name="Cancel", exact=True).click()
    for prompt, state in (("first", "canceled"), ("second", "failed"), ("third", "failed"), ("report", "queued")):
        expect(node(page, prompt).locator(".badge")).to_have_text(state)
    page.goto(f"{paused.url}/#/jobs/{anyway}")
    page.get_by_role("button", name="Cancel", exact=True).click()
    expect(page.locator(".job-head .badge")).to_have_text("canceled")
