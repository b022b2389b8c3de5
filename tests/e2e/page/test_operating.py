"""What operators do in a browser: watch, cancel one job or many, delete, redrive; also while the service restarts."""

from __future__ import annotations

import json
import re
from typing import Any

from harness.waiting import wait_until
from playwright.sync_api import expect


def test_all_jobs_that_match_are_canceled_and_then_deleted_after_a_count(open_page: Any, waiting: Any) -> None:
    sets = ["a"] * 130 + ["b"] * 20
    lines = [{"model": "demo", "prompt": f"a circle {n}", "metadata": {"set": name}} for n, name in enumerate(sets)]
    body = "\n".join(map(json.dumps, lines))
    sent = waiting.client.post("/v1/jobs:bulk", content=body, headers={"Content-Type": "application/x-ndjson"})
    assert sent.text.count('"id"') == 150
    page = open_page(waiting.url, "#/jobs?metadata=set%3Da")
    expect(page.locator("tbody tr")).to_have_count(30)
    page.get_by_role("button", name="Cancel all matching").click()
    expect(page.get_by_role("dialog")).to_contain_text("130 jobs")
    page.get_by_role("button", name="Keep").click()
    assert len(_listed(waiting, "a", status="queued")) == 100, "nothing before the confirmation"
    page.get_by_role("button", name="Cancel all matching").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel 130 jobs").click()
    expect(page.get_by_text("Canceled 130 jobs").first).to_be_visible()
    assert _listed(waiting, "a", status="queued") == []
    assert len(_listed(waiting, "b", status="queued")) == 20
    page.get_by_role("button", name="Delete all matching").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete 130 jobs").click()
    expect(page.get_by_text("Deleted 130 jobs").first).to_be_visible()
    assert _listed(waiting, "a") == []
    waiting.client.post("/v1/jobs:cancel", params={"metadata.set": "b"})


def test_queued_jobs_get_another_priority_and_canceled_ones_are_retried(open_page: Any, waiting: Any) -> None:
    """One of them on its page, the others by filter; the number is that of the jobs that would change."""
    ids = [waiting.submit(prompt=f"a ring {n}", metadata={"set": "p"}) for n in range(3)]
    page = open_page(waiting.url, f"#/jobs/{ids[0]}")
    page.get_by_role("button", name="Priority").click()
    page.get_by_role("dialog").get_by_label("Priority").select_option("bulk")
    page.get_by_role("dialog").get_by_role("button", name="Change").click()
    expect(page.get_by_text("Changed the priority").first).to_be_visible()
    assert waiting.job(ids[0])["priority"] == "bulk"
    page = open_page(waiting.url, "#/jobs?metadata=set%3Dp")
    page.get_by_role("button", name="Priority of all matching").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("3 jobs")
    dialog.get_by_label("Priority").select_option("bulk")
    expect(dialog).to_contain_text("2 jobs")
    assert waiting.job(ids[1])["priority"] == "standard", "nothing before the confirmation"
    dialog.get_by_role("button", name="Update 2 jobs").click()
    expect(page.get_by_text("Updated 2 jobs").first).to_be_visible()
    assert [waiting.job(job_id)["priority"] for job_id in ids] == ["bulk"] * 3
    waiting.client.post("/v1/jobs:cancel", params={"metadata.set": "p"})
    page.get_by_role("button", name="Retry all matching").click()
    dialog.get_by_role("button", name="Retry 3 jobs").click()
    expect(page.get_by_text("Retried 3 jobs").first).to_be_visible()
    assert len(_listed(waiting, "p", status="queued")) == len(_listed(waiting, "p", status="canceled")) == 3
    waiting.client.post("/v1/jobs:cancel", params={"metadata.set": "p"})


def test_a_job_is_paused_and_resumed_on_its_page(open_page: Any, waiting: Any) -> None:
    job_id = waiting.submit(prompt="a ring")
    page = open_page(waiting.url, f"#/jobs/{job_id}")
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator(".job-head .badge")).to_have_text("paused")
    expect(page.get_by_text("It was paused just now, and goes on when it is resumed.")).to_be_visible()
    assert waiting.job(job_id)["paused_at"] is not None
    page.get_by_role("button", name="Resume", exact=True).click()
    expect(page.locator(".job-head .badge")).to_have_text("queued")
    assert waiting.job(job_id)["paused_at"] is None
    waiting.client.post(f"/v1/jobs/{job_id}/cancel")


def test_a_job_that_is_deleted_elsewhere_leaves_the_page(open_page: Any, waiting: Any) -> None:
    job_id = waiting.submit(prompt="a ring")
    waiting.client.post(f"/v1/jobs/{job_id}/cancel")
    page = open_page(waiting.url, f"#/jobs/{job_id}")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    waiting.client.delete(f"/v1/jobs/{job_id}")
    expect(page.get_by_role("alert")).to_contain_text("This does not exist.")
    expect(page.get_by_role("button", name="Retry")).to_have_count(0)


def test_the_choice_of_a_question_is_fixed_while_it_runs(open_page: Any, waiting: Any, hold: Any) -> None:
    job_id = waiting.submit(prompt="a ring", metadata={"set": "fixed"})
    page = open_page(waiting.url, "#/jobs?metadata=set%3Dfixed")
    page.get_by_role("button", name="Priority of all matching").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("1 job")
    held = hold(page, re.compile(r"jobs:update\?(?!.*dry_run)"))
    dialog.get_by_role("button", name="Update 1 job").click()
    expect(dialog.get_by_label("Priority")).to_be_disabled()
    expect(dialog.get_by_role("button", name="Update")).to_be_disabled()
    held[0].continue_()
    expect(page.get_by_text("Updated 1 job").first).to_be_visible()
    assert waiting.job(job_id)["priority"] == "interactive"
    waiting.client.post(f"/v1/jobs/{job_id}/cancel")


def test_jobs_submitted_after_the_question_are_not_changed(open_page: Any, waiting: Any) -> None:
    first = waiting.submit(prompt="a ring", metadata={"set": "late"})
    page = open_page(waiting.url, "#/jobs?metadata=set%3Dlate")
    page.get_by_role("button", name="Cancel all matching").click()
    expect(page.get_by_role("dialog")).to_contain_text("1 job")
    later = waiting.submit(prompt="a later ring", metadata={"set": "late"})
    page.get_by_role("dialog").get_by_role("button", name="Cancel 1 job").click()
    expect(page.get_by_text("Canceled 1 job").first).to_be_visible()
    assert [waiting.job(job_id)["status"] for job_id in (first, later)] == ["canceled", "queued"]
    waiting.client.post(f"/v1/jobs/{later}/cancel")


def test_a_filter_that_cannot_be_read_matches_nothing(open_page: Any, waiting: Any) -> None:
    job_id = waiting.submit(prompt="a ring")
    for view, fault in (("metadata=order", "is not key=value"), ("after_time=soon", "soon is not a time")):
        page = open_page(waiting.url, f"#/jobs?{view}")
        expect(page.get_by_role("alert")).to_contain_text(fault)
        page.get_by_role("button", name="Cancel all matching").click()
        expect(page.locator(".toast")).to_contain_text(fault)
    assert waiting.job(job_id)["status"] == "queued"
    waiting.client.post(f"/v1/jobs/{job_id}/cancel")


def test_metadata_with_a_comma_or_without_a_text_is_filtered_by(open_page: Any, waiting: Any) -> None:
    ids = [waiting.submit(prompt="a ring", metadata=one) for one in ({"list": "1,2"}, {"list": "1"}, {"list": ""})]
    for job_id, link in ((ids[0], "list=1,2"), (ids[2], "list=")):
        page = open_page(waiting.url, f"#/jobs/{job_id}")
        page.get_by_role("link", name=link, exact=True).click()
        expect(page.locator("tbody tr")).to_have_count(1)
        expect(page.locator("tbody tr")).to_have_attribute("data-job", job_id)
    for job_id in ids:
        waiting.client.post(f"/v1/jobs/{job_id}/cancel")


def test_jobs_are_found_by_a_part_of_their_prompt(open_page: Any, waiting: Any) -> None:
    job_id = waiting.submit(prompt="An unmistakable Lighthouse at dusk")
    page = open_page(waiting.url, "#/jobs")
    page.get_by_role("textbox", name="Prompt").fill("lighthouse")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_have_attribute("data-job", job_id)
    assert "prompt=lighthouse" in page.url
    waiting.client.post(f"/v1/jobs/{job_id}/cancel")


def test_a_page_without_jobs_is_read_on_with_the_same_filters(open_page: Any, waiting: Any) -> None:
    page = open_page(waiting.url)
    empty = {"object": "list", "data": [], "has_more": True, "next_cursor": "next", "first_id": None, "last_id": None}
    page.route(re.compile(r"/v1/jobs\?.*created_after=(?!.*&after=)"), lambda route: route.fulfill(json=empty))
    with page.expect_request(re.compile(r"/v1/jobs\?.*&after=next")) as read:
        page.goto(f"{waiting.url}/#/jobs?after_time=2026-01-31T12:00")
    assert "created_after=2026-01-31T" in read.value.url


def _listed(stack: Any, name: str, **query: str) -> list[Any]:
    data: list[Any] = stack.read("/v1/jobs", limit="100", **{"metadata.set": name}, **query)["data"]
    return data


def _reads_at_once(page: Any, path: str) -> list[int]:
    """For each request for path from now on: how many of them were open when it began, with itself."""
    open_reads: list[Any] = []
    counts: list[int] = []

    def begin(request: Any) -> None:
        if request.url.endswith(path):
            open_reads.append(request)
            counts.append(len(open_reads))

    def end(request: Any) -> None:
        if request in open_reads:  # one that was open before is not counted
            open_reads.remove(request)

    page.on("request", begin)
    page.on("requestfinished", end)
    page.on("requestfailed", end)
    return counts


def test_selected_jobs_are_canceled_with_the_keyboard(open_page: Any, waiting: Any) -> None:
    ids = [waiting.submit(prompt=f"a square {n}", metadata={"set": "keys"}) for n in range(3)]
    page = open_page(waiting.url, "#/jobs?metadata=set%3Dkeys")
    expect(page.locator("tbody tr")).to_have_count(3)
    reads = _reads_at_once(page, "/v1/queues")
    for key in "jxjx":
        page.keyboard.press(key)
    with page.expect_request("**/v1/queues"):
        page.get_by_role("button", name="Cancel 2").click()
    expect(page.locator("tbody .badge.is-canceled")).to_have_count(2)
    states = [waiting.job(job_id)["status"] for job_id in ids]
    assert states == ["queued", "canceled", "canceled"], "the newest two are the first two rows"
    assert max(reads) == 1, "one read of the overview at a time"
    waiting.client.post(f"/v1/jobs/{ids[0]}/cancel")


def test_a_dead_letter_shows_its_cause_and_is_redriven(open_page: Any, waiting: Any, dead_letter: Any) -> None:
    job_id = dead_letter("a prompt that ends its worker")
    page = open_page(waiting.url, "#/dead-letters")
    letter = page.get_by_role("article", name=f"Dead letter {job_id}")
    expect(letter).to_contain_text("worker lost")
    expect(letter).to_contain_text("a prompt that ends its worker")
    letter.get_by_role("button", name="Redrive").click()
    expect(letter).to_have_count(0)
    assert waiting.job(job_id)["status"] == "queued"
    waiting.client.post(f"/v1/jobs/{job_id}/cancel")


def test_a_job_that_starts_from_one_that_has_not_run_links_it(open_page: Any, waiting: Any) -> None:
    source = waiting.submit(prompt="a circle")
    child = waiting.submit(prompt="a square", image={"job": source}, strength=0.5)
    page = open_page(waiting.url, f"#/jobs/{child}")
    page.locator(".input-image").get_by_role("link", name=source).click()
    expect(page).to_have_url(re.compile(f"#/jobs/{source}$"))
    for job_id in (child, source):
        waiting.client.post(f"/v1/jobs/{job_id}/cancel")


def test_a_job_that_is_redriven_is_open_again_on_its_page(open_page: Any, waiting: Any, dead_letter: Any) -> None:
    job_id = dead_letter("a prompt that is tried again")
    page = open_page(waiting.url, f"#/jobs/{job_id}")
    expect(page.locator(".events")).to_contain_text("failed")
    assert waiting.client.post(f"/v1/dead-letters/{job_id}/redrive").is_success
    expect(page.locator(".job-head .badge")).to_have_text("queued")
    waiting.client.post(f"/v1/jobs/{job_id}/cancel")
    expect(page.locator(".job-head .badge")).to_have_text("canceled")
    assert waiting.client.delete(f"/v1/jobs/{job_id}").is_success
    expect(page.get_by_role("alert").filter(has_text="This does not exist.")).to_be_visible()


def test_a_dead_letter_is_purged_after_a_confirmation(open_page: Any, waiting: Any, dead_letter: Any) -> None:
    job_id = dead_letter("another one")
    page = open_page(waiting.url, "#/dead-letters")
    page.get_by_role("button", name=f"Purge {job_id}").click()
    page.get_by_role("dialog").get_by_role("button", name="Purge", exact=True).click()
    expect(page.get_by_text("No job has failed permanently.")).to_be_visible()
    assert waiting.client.get(f"/v1/jobs/{job_id}").status_code == 404


def test_all_dead_letters_that_match_are_redriven_and_purged(open_page: Any, waiting: Any, dead_letter: Any) -> None:
    ids = [dead_letter(f"one of two {n}") for n in range(2)]
    page = open_page(waiting.url, "#/dead-letters")
    page.get_by_label("Reason").fill("unreadable")
    page.get_by_label("Reason").press("Enter")
    expect(page.get_by_text("No dead letter matches.")).to_be_visible()
    page.get_by_label("Reason").fill("worker_lost")
    page.get_by_label("Reason").press("Enter")
    page.get_by_role("button", name="Redrive all matching").click()
    page.get_by_role("dialog").get_by_role("button", name="Redrive 2 dead letters").click()
    expect(page.get_by_text("Redrove 2 dead letters").first).to_be_visible()
    assert [waiting.job(job_id)["status"] for job_id in ids] == ["queued"] * 2
    for job_id in ids:
        waiting.client.post(f"/v1/jobs/{job_id}/cancel")
    dead_letter("a last one")
    page.get_by_role("button", name="Purge all matching").click()
    page.get_by_role("dialog").get_by_role("button", name="Purge 1 dead letter").click()
    expect(page.get_by_text("No dead letter matches.")).to_be_visible()


def test_it_reconnects_when_the_service_is_back(open_page: Any, waiting: Any) -> None:
    page = open_page(waiting.url)
    connection = page.locator(".connection")
    expect(connection).to_have_text("Live")
    waiting.api.kill()
    expect(connection).to_have_text(re.compile("Reconnecting"))
    waiting.api.start()
    wait_until(waiting.ready, "the API is ready")
    expect(connection).to_have_text("Live")


def test_a_hidden_page_asks_for_nothing(open_page: Any, waiting: Any, own_context: Any) -> None:
    page = open_page(waiting.url, "docs", own_context)
    page.clock.install()
    page.goto(waiting.url)
    expect(page.locator(".tiles")).to_be_visible()
    requests: list[str] = []
    unanswered: set[Any] = set()
    page.on("request", lambda request: (requests.append(request.url), unanswered.add(request)))
    for end in ("requestfinished", "requestfailed"):
        page.on(end, lambda request: unanswered.discard(request))
    page.clock.run_for(10_000)
    wait_until(lambda: page.evaluate("1") and requests, "a visible page reads")
    page.evaluate(
        "Object.defineProperty(document, 'hidden', { get: () => window.away ?? false, configurable: true }); "
        "window.away = true; document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.clock.run_for(10_000)
    wait_until(lambda: page.evaluate("1") and not unanswered, "what it asked for before is answered")
    requests.clear()
    for _ in range(20):
        page.clock.run_for(5_000)
    assert requests == []
    page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    wait_until(lambda: page.evaluate("1") and requests, "it reads again when it is shown")


def test_the_keys_lead_to_every_view(open_page: Any, waiting: Any) -> None:
    """Also from an address that is none."""
    page = open_page(waiting.url, "#/%")
    expect(page.get_by_role("heading", level=1, name="Now")).to_be_visible()
    views = {
        "p": "Playground",
        "j": "Jobs",
        "g": "Groups",
        "b": "Batches",
        "d": "Dead letters",
        "m": "Models",
        "t": "Tenants",
        "a": "Action log",
        "n": "Now",
    }
    for key, name in views.items():
        page.keyboard.press("g")
        page.keyboard.press(key)
        expect(page.get_by_role("heading", level=1, name=name)).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
