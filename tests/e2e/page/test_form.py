"""What the form of the playground finds wrong in a browser, before and after a request is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.http_server import png
from playwright.sync_api import expect


def test_a_file_that_is_too_large_is_refused_before_it_is_sent(open_page: Any, waiting: Any, tmp_path: Path) -> None:
    large = tmp_path / "large.png"
    large.write_bytes(png() + bytes(21 << 20))
    page = open_page(waiting.url, "#/playground")
    page.get_by_role("combobox", name="Task").select_option("image_to_image")
    uploads: list[str] = []
    page.on("request", lambda request: uploads.append(request.url) if request.url.endswith("/v1/inputs") else None)
    page.locator("input[type=file]").set_input_files(large)
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
