"""What the form of the playground finds wrong in a browser, before and after a request is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import ROOT, png
from harness.waiting import wait_until
from playwright.sync_api import Page, expect
from tiny.safetensors_file import demo_lora


@pytest.fixture(scope="module")
def waiting(chromium: str, make_shared_stack: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A service without workers, whose model has a scorer."""
    file = tmp_path_factory.mktemp("models") / "models.toml"
    text = (ROOT / "models.toml").read_text("utf-8").replace('"demo/', f'"{ROOT}/demo/')
    file.write_text(text.replace("# scorer = ", "scorer = "), encoding="utf-8")
    return make_shared_stack(models=str(file)).start(workers=0)


def generate(page: Page, prompt: str) -> dict[str, Any]:
    """Submit the form with a prompt, and return the job."""
    page.locator("textarea[name=prompt]").fill(prompt)
    with page.expect_response("**/page/jobs") as response:
        page.get_by_role("button", name=re.compile("^Generate")).click()
    return dict(response.value.json())


def is_refused(page: Page, field: str, fault: str) -> None:
    """Check that a fault is shown beside its field, and that nothing can be sent."""
    expect(page.locator(".is-faulty").filter(has_text=field).get_by_role("alert")).to_have_text(fault)
    expect(page.get_by_role("button", name=re.compile("^Generate"))).to_be_disabled()


def test_a_file_that_is_too_large_is_refused_before_it_is_sent(open_page: Any, waiting: Any, tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(png() + bytes(21 << 20))
    page = open_page(waiting.url, "#/playground")
    page.get_by_role("combobox", name="Task").select_option("image_to_image")
    uploads: list[str] = []
    page.on("request", lambda request: uploads.append(request.url) if request.url.endswith("/v1/inputs") else None)
    page.locator("input[name=image]").set_input_files(large)
    expect(page.get_by_role("alert")).to_have_text("large.png has 21 MiB; at most 20 MiB are allowed.")
    assert uploads == []


def test_what_is_wrong_with_a_field_is_shown_until_it_changes(open_page: Any, waiting: Any) -> None:
    page = open_page(waiting.url, "#/playground")
    page.get_by_role("textbox", name="Prompt").fill("a circle")
    page.get_by_text("More", exact=True).click()
    deadline = page.get_by_role("textbox", name="Deadline, seconds")
    deadline.fill("soon")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("alert")).to_contain_text("deadline_s")
    deadline.fill("60")
    expect(page.get_by_role("alert")).to_have_count(0)
    steps = page.get_by_role("spinbutton", name="Steps")
    steps.fill("")
    steps.blur()
    expect(steps).to_have_value("12")  # which is what is sent


def test_an_adapter_is_uploaded_used_and_deleted(open_page: Any, waiting: Any, tmp_path: Path, hold: Any) -> None:
    """Also while they are read, which is done again then. One that the service refuses is named beside the button; a
    deletion asks first.
    """
    for name, data in (("style", demo_lora(3)), ("broken", b"no weights" * 100)):
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    page = open_page(waiting.url)
    reads = hold(page, "**/v1/adapters?*")
    page.goto(f"{waiting.url}/#/playground")
    adapters = page.get_by_role("group", name="Adapters", exact=True)
    adapters.locator("input[type=file]").set_input_files(tmp_path / "broken.safetensors")
    expect(adapters.get_by_role("alert")).to_contain_text("no safetensors file")
    adapters.locator("input[type=file]").set_input_files(tmp_path / "style.safetensors")
    expect(adapters.get_by_role("checkbox")).to_be_checked()
    reads[0].fulfill(json={"object": "list", "data": [], "has_more": False, "next_cursor": None})  # of before
    wait_until(lambda: page.evaluate("1") and len(reads) > 1, "they are read again")
    reads[1].continue_()
    page.unroute("**/v1/adapters?*")
    expect(adapters.get_by_role("checkbox", name="style.safetensors")).to_be_checked()
    expect(adapters.get_by_role("alert")).to_have_count(0)
    adapters.get_by_role("spinbutton", name="Scale of style.safetensors").fill("0.5")
    page.get_by_role("textbox", name="Prompt").fill("a circle in a style")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".run-panel .badge")).to_have_text("queued")
    (uploaded,) = waiting.read("/v1/adapters")["data"]
    (job,) = waiting.read("/v1/jobs", prompt="a circle in a style")["data"]
    assert [(one["id"], one["scale"]) for one in job["adapters"]] == [(uploaded["id"], 0.5)]
    waiting.client.post(f"/v1/jobs/{job['id']}/cancel")
    page.goto(f"{waiting.url}/#/jobs")
    page.goto(f"{waiting.url}/#/playground?from={job['id']}")
    expect(adapters.get_by_role("checkbox", name="style.safetensors")).to_be_checked()
    adapters.get_by_role("button", name="Delete style.safetensors").click()
    assert len(waiting.read("/v1/adapters")["data"]) == 1, "nothing before the confirmation"
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    expect(adapters.get_by_role("checkbox")).to_have_count(0)
    assert waiting.read("/v1/adapters")["data"] == []


def test_candidates_are_checked_sent_and_kept_in_a_duplicate(open_page: Any, waiting: Any) -> None:
    """Only for images; the number of images is that of those kept."""
    page = open_page(waiting.url, "#/playground")
    page.get_by_role("textbox", name="Prompt").fill("a circle")
    images = page.get_by_role("spinbutton", name="Images")
    images.fill("3")
    page.get_by_role("checkbox", name="Begin more images than are kept").check()
    expect(images).to_have_count(0)
    begin, keep = [page.get_by_role("spinbutton", name=name) for name in ("Begin", "Keep")]
    shares = page.get_by_role("textbox", name="Compare after these shares")
    begin.fill("9")
    is_refused(page, "Begin", "from 2 to 8")
    begin.fill("8")
    keep.fill("8")
    is_refused(page, "Keep", "at least 1, and fewer than begin")
    keep.fill("2")
    for wrong in ("", "0.5, 0.25", "half", "0.5, 1.5"):
        shares.fill(wrong)
        is_refused(page, "Compare after", "1 to 8 rising shares above 0, at most 1")
    shares.fill("0.1, 0.5")
    group = page.get_by_role("group", name="Candidates", exact=True)
    expect(group).to_contain_text("8 images begin; 4 after 10%, 2 after 50% of the steps go on.")
    job = generate(page, "the best circles")
    assert (job["best_of"], job["n"]) == ({"candidates": 8, "keep": 2, "at": [0.1, 0.5]}, 2)
    page.locator("textarea[name=prompt]").fill("another text, until the job is read")
    page.goto(f"{waiting.url}/#/playground?from={job['id']}")
    expect(page.locator("textarea[name=prompt]")).to_have_value("the best circles")
    page.locator("textarea[name=prompt]").fill("an edited prompt")
    page.get_by_role("link", name="Models", exact=True).click()
    page.go_back()
    expect(page.locator("textarea[name=prompt]")).to_have_value("an edited prompt")
    page.get_by_role("checkbox", name="Begin more images than are kept").uncheck()
    expect(images).to_have_value("2")
    page.get_by_role("checkbox", name="Begin more images than are kept").check()
    begin.fill("3")
    assert generate(page, "better circles")["best_of"]["candidates"] == 3


def test_a_job_is_for_later_and_after_others(open_page: Any, waiting: Any) -> None:
    """Named by hand, chosen from the open ones, or from the page of one."""
    first, second = [waiting.submit(prompt=f"a {name} parent") for name in ("first", "second")]
    page = open_page(waiting.url, f"#/jobs/{first}")
    page.get_by_role("link", name="New job after it").click()
    after = page.get_by_role("textbox", name="After the end of these jobs")
    expect(after).to_have_value(first)
    page.locator("textarea[name=prompt]").fill("a child")
    choice = page.get_by_role("combobox", name="Add an open job")
    choice.focus()
    option = choice.locator("option").filter(has_text="a second parent")
    expect(option).to_have_count(1)
    choice.select_option(value=second)
    expect(after).to_have_value(f"{first}, {second}")
    after.fill(f"{first} job_1")
    is_refused(page, "After the end", "job_1 is not the id of a job")
    after.fill(f"{first} {second}")
    page.get_by_role("combobox", name="If one of them").select_option("run")
    start = page.get_by_label("Not before")
    start.fill((datetime.now() + timedelta(days=31)).strftime("%Y-%m-%dT%H:%M"))
    is_refused(page, "Not before", "at most 30 days from now")
    in_8_h = page.get_by_role("button", name="in 8 h")
    in_8_h.click()
    expect(start).to_have_value("")
    expect(in_8_h).to_have_attribute("aria-pressed", "true")
    job = generate(page, "a child for later")
    assert (job["after"], job["on_parent_failure"]) == ([first, second], "run")
    not_before, created_at = (datetime.fromisoformat(job[name]) for name in ("not_before", "created_at"))
    assert not_before == created_at + timedelta(hours=8)
    tab = open_page(waiting.url, f"#/jobs/{job['id']}")
    expect(tab.get_by_text("It waits for 2 jobs to end.")).to_be_visible()
    waiting.client.post(f"/v1/jobs/{first}/cancel")
    waiting.client.post(f"/v1/jobs/{second}/cancel")
    expect(tab.get_by_text(re.compile("It is for later: 2"))).to_be_visible()
    page.get_by_role("button", name="at once").click()
    after.fill("")
    job = generate(page, "a child no more")
    assert (job["after"], job["on_parent_failure"], job["not_before"]) == ([], "fail", None)
