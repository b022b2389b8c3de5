"""The playground in a browser: a prompt to its image, input images, and the equivalent calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import ROOT, png
from playwright.sync_api import Page, expect

PROMPT = "a red circle on a blue ground, left"
SHOWN = "image => image.complete && image.naturalWidth > 0"


def generate(page: Page, prompt: str = PROMPT, steps: int = 12) -> None:
    page.get_by_role("spinbutton", name="Steps").fill(str(steps))
    page.get_by_role("textbox", name="Prompt", exact=False).first.fill(prompt)
    page.get_by_role("button", name=re.compile("^Generate")).click()


def result(page: Page) -> Any:
    """Wait for the result, and return its panel."""
    panel = page.locator(".run-panel")
    expect(panel.get_by_role("heading", name="Result")).to_be_visible()
    return panel


def test_a_prompt_to_its_image_in_three_clicks(open_page: Any, working: Any) -> None:
    """Its previews are shown while it runs; its parameters when it has ended."""
    page = open_page(working.url)
    page.get_by_role("link", name="Playground", exact=True).click()
    page.locator("textarea").click()
    page.keyboard.type(PROMPT)
    page.get_by_role("spinbutton", name="Steps").evaluate(
        "field => { field.value = 90; field.dispatchEvent(new Event('input', { bubbles: true })); }"
    )
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".run-panel .preview img")).to_be_visible()
    assert page.locator(".run-panel .preview img").evaluate(SHOWN)
    panel = result(page)
    expect(panel.locator(".artifact img")).to_be_visible()
    page.wait_for_function(f"({SHOWN})(document.querySelector('.run-panel .artifact img'))")
    (job,) = [job for job in working.read("/v1/jobs")["data"] if job["steps"] == 90]
    expect(panel).to_contain_text(str(job["seed"]))
    assert (job["status"], job["prompt"]) == ("succeeded", PROMPT)


def test_the_same_with_another_seed_and_a_duplicate_to_edit(open_page: Any, working: Any) -> None:
    page = open_page(working.url, "#/playground")
    generate(page, "a green square on a white ground", steps=4)
    first = result(page).locator(".mono").first.inner_text()
    page.get_by_role("button", name="Same with another seed").click()
    expect(page.get_by_role("navigation", name="Runs of this tab").get_by_role("button")).to_have_count(2)
    expect(result(page).locator(".mono").first).not_to_have_text(first)
    page.get_by_role("button", name="Duplicate and edit").click()
    expect(page.locator("[name=seed]")).to_have_value(result(page).locator(".mono").first.inner_text())


def test_a_job_starts_from_an_uploaded_image(open_page: Any, working: Any, tmp_path: Path) -> None:
    picked = tmp_path / "start.png"
    picked.write_bytes(png())
    page = open_page(working.url, "#/playground")
    page.get_by_role("combobox", name="Task").select_option("image_to_image")
    page.locator("input[type=file]").set_input_files(picked)
    expect(page.locator(".chosen img")).to_be_visible()
    generate(page, "a yellow star", steps=6)
    result(page)
    job = working.read("/v1/jobs", limit="1")["data"][0]
    assert (job["task"], job["status"]) == ("image_to_image", "succeeded")
    assert job["image"] is not None


def test_a_pasted_image_is_used(open_page: Any, working: Any) -> None:
    page = open_page(working.url, "#/playground")
    page.get_by_role("combobox", name="Task").select_option("image_to_image")
    page.evaluate(
        """async bytes => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "pasted.png", { type: "image/png" }));
            dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
        }""",
        list(png()),
    )
    expect(page.locator(".chosen img")).to_be_visible()


def test_an_invalid_field_is_named_beside_it(open_page: Any, working: Any) -> None:
    page = open_page(working.url, "#/playground")
    page.get_by_role("spinbutton", name="Width").fill("65")
    generate(page)
    expect(page.locator(".is-faulty").filter(has_text="Width").get_by_role("alert")).to_contain_text("width")


@pytest.mark.parametrize("client", ["curl", "Python", "CLI", "OpenAI"])
def test_the_equivalent_calls_do_the_same(open_page: Any, working: Any, tmp_path: Path, client: str) -> None:
    """Each is run as it is copied."""
    page = open_page(working.url, "#/playground")
    page.get_by_role("spinbutton", name="Steps").fill("4")
    page.locator("[name=seed]").fill("7")
    page.locator("textarea").fill(f'a {client} circle\'s "edge"')
    page.get_by_role("group", name="Client").get_by_role("button", name=client).click()
    text = page.locator(".snippets code").inner_text()
    if client in ("curl", "CLI"):
        command = ["bash", "-ec", text.replace("fusequeue submit", f"{sys.executable} -m cli.main submit", 1)]
    else:
        command = [sys.executable, "-c", text]
    env = {**working.env, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    job = working.read("/v1/jobs", limit="1")["data"][0]
    sent = {name: job[name] for name in ("model", "prompt", "steps", "seed", "status")}
    prompt = f'a {client} circle\'s "edge"'
    assert sent == {"model": "demo", "prompt": prompt, "steps": 4, "seed": 7, "status": "succeeded"}
