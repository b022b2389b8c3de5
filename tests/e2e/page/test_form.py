"""What the form of the playground finds wrong in a browser, before and after a request is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.http_server import png
from playwright.sync_api import expect
from tiny.safetensors_file import demo_lora


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


def test_an_adapter_is_uploaded_used_and_deleted(open_page: Any, waiting: Any, tmp_path: Path) -> None:
    """One that the service refuses is named beside the button; a deletion asks first."""
    for name, data in (("style", demo_lora(3)), ("broken", b"no weights" * 100)):
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    page = open_page(waiting.url, "#/playground")
    adapters = page.get_by_role("group", name="Adapters", exact=True)
    adapters.locator("input[type=file]").set_input_files(tmp_path / "broken.safetensors")
    expect(adapters.get_by_role("alert")).to_contain_text("no safetensors file")
    adapters.locator("input[type=file]").set_input_files(tmp_path / "style.safetensors")
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
