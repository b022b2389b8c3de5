"""The page of a service that requires keys."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from harness.axe import check
from harness.http_server import ROOT, png
from playwright.sync_api import Page, Route, expect

STORED = """async () => [
    localStorage.length, sessionStorage.length, document.cookie, (await indexedDB.databases()).length, location.href,
]"""


def enter(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use this key").click()


def test_it_asks_for_a_key_and_keeps_it_in_memory_only(open_page: Any, keyed: Any, create_key: Any) -> None:
    """A wrong key is refused with its reason, a right one shows all; a reload asks again."""
    key = create_key("jobs:read,jobs:write,metrics,admin")
    page = open_page(keyed.url)
    for wrong, fault in (("fq_wrong", "mistyped"), ("fq_cut off …", "No key has such characters")):
        enter(page, wrong)
        expect(page.get_by_role("alert")).to_contain_text(fault)
    enter(page, key)
    expect(page.get_by_role("heading", level=1, name="Now")).to_be_visible()
    expect(page.locator(".worker")).to_have_count(1)
    assert page.evaluate(STORED) == [0, 0, "", 0, f"{keyed.url}/"]
    page.reload()
    expect(page.get_by_label("API key")).to_be_visible()
    expect(page.locator(".worker")).to_have_count(0)


def test_the_question_for_a_key_stays_until_there_is_one(open_page: Any, keyed: Any, create_key: Any) -> None:
    """Chrome closes a dialog at the second Escape; a mistyped key of a change is asked for once more, not twice."""
    page = open_page(keyed.url)
    expect(page.get_by_label("API key")).to_be_visible()
    check(page, "light")
    for _ in range(3):
        page.keyboard.press("Escape")
    enter(page, create_key("jobs:read"))
    expect(page.locator(".tiles")).to_be_visible()
    page.get_by_role("button", name="Change key").click()
    enter(page, "fq_wrong")
    expect(page.get_by_role("alert")).to_contain_text("mistyped")
    enter(page, create_key("jobs:read"))
    expect(page.locator(".tiles")).to_be_visible()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_a_page_without_its_key_asks_for_nothing(open_page: Any, keyed: Any, create_key: Any, own_context: Any) -> None:
    """Its stream ends, and it reads on with the next key."""
    keyed.client.put("/v1/pauses/models/demo", json={"reason": "its job stays queued"})
    job_id = keyed.submit(prompt="a ring that waits")
    page = open_page(keyed.url, context=own_context)
    page.clock.install()
    page.goto(f"{keyed.url}/#/jobs/{job_id}")
    page.reload()
    enter(page, create_key("jobs:read,admin"))
    expect(page.locator(".events")).to_contain_text("queued")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    with page.expect_event("requestfailed", lambda request: "/page/live" in request.url):
        page.set_viewport_size({"width": 1024, "height": 800})
        page.get_by_role("button", name="Forget the key").click()
    expect(page.get_by_label("API key")).to_be_visible()
    page.wait_for_load_state("networkidle")
    requests.clear()
    for _ in range(6):
        page.clock.run_for(5_000)
    assert requests == []
    enter(page, create_key("jobs:read"))
    expect(page.locator(".events")).to_contain_text("queued")
    keyed.client.post(f"/v1/jobs/{job_id}/cancel")
    keyed.client.delete("/v1/pauses/models/demo")


def test_a_prompt_becomes_an_image_with_a_key(
    open_page: Any, keyed: Any, create_key: Any, wait_for_preview: Any
) -> None:
    """Its URL is signed; the preview and the events come with the key."""
    page = open_page(keyed.url, "#/playground")
    enter(page, create_key("jobs:read,jobs:write"))
    page.locator("textarea").fill("a blue cross on a white ground")
    page.get_by_role("spinbutton", name="Steps").fill("100")
    page.get_by_role("button", name="Generate").click()
    wait_for_preview(page)
    expect(page.locator(".run-panel .artifact img")).to_be_visible()
    page.wait_for_function("() => document.querySelector('.run-panel .artifact img').naturalWidth > 0")
    expect(page.get_by_role("link", name="Dead letters")).to_have_count(0)


def test_an_input_image_is_fetched_with_the_key(open_page: Any, keyed: Any, create_key: Any, tmp_path: Any) -> None:
    uploaded = keyed.client.post("/v1/inputs", files={"file": ("a.png", png())}).json()["id"]
    job_id = keyed.submit(prompt="a red ring", image=uploaded, steps=4)
    keyed.finish(job_id)
    page = open_page(keyed.url, f"#/jobs/{job_id}")
    enter(page, create_key("jobs:read"))
    expect(page.locator(".input-image img")).to_be_visible()
    assert page.locator(".input-image img").get_attribute("src").startswith("blob:")


def test_a_reader_sees_no_buttons_that_change_something(open_page: Any, keyed: Any, create_key: Any) -> None:
    job_id = keyed.submit(prompt="a white circle", steps=4)
    keyed.finish(job_id)
    views = {f"#/jobs/{job_id}": ".job-head", "#/jobs": "tbody tr", "#/models": ".model", "#/now": ".tiles"}
    page = open_page(keyed.url)
    enter(page, create_key("jobs:read"))
    for view, ready in views.items():
        page.goto(f"{keyed.url}/{view}")
        expect(page.locator(ready).first).to_be_visible()
        shown = page.locator("main button, main a.button").all_inner_texts()
        allowed = {"Table", "Gallery", "Clear", "Save", "Copy", "curl", "Python", "CLI", "OpenAI", "Older", "More", ""}
        assert {text.strip() for text in shown} <= allowed, view
        assert page.locator("main input[type=checkbox]:not(.chip input)").count() == 0
    page.goto(f"{keyed.url}/#/playground")
    page.locator("textarea").fill("a white circle")
    expect(page.get_by_role("button", name="Generate")).to_be_disabled()


def test_only_operators_see_pauses_and_the_action_log(open_page: Any, keyed: Any, create_key: Any) -> None:
    keyed.client.put("/v1/pauses/tenants/acme", json={"reason": "a bill"})
    for scopes, shown in (("jobs:read", 0), ("jobs:read,admin", 1)):
        page = open_page(keyed.url)
        enter(page, create_key(scopes))
        expect(page.locator(".tiles")).to_be_visible()
        for view in ("Action log", "Tenants", "Keys"):
            expect(page.get_by_role("link", name=view)).to_have_count(shown)
        expect(page.get_by_role("region", name="Pauses")).to_have_count(shown)
        expect(page.get_by_role("button", name="Pause work")).to_have_count(shown)
    keyed.client.delete("/v1/pauses/tenants/acme")


def test_a_revoked_key_is_asked_for_again(open_page: Any, keyed: Any, create_key: Any) -> None:
    key = create_key("jobs:read")
    page = open_page(keyed.url)
    enter(page, key)
    expect(page.locator(".tiles")).to_be_visible()
    command = [sys.executable, "-m", "cli.main", "keys", "revoke", key]
    subprocess.run(command, cwd=ROOT, env=keyed.env, capture_output=True, timeout=60, check=True)
    expect(page.get_by_label("API key")).to_be_visible()


def test_the_reference_sends_requests_with_a_key_and_calls_no_other_service(
    own_context: Any, keyed: Any, create_key: Any
) -> None:
    """Also behind a proxy that strips a path prefix; narrow and dark. Swagger UI warns of links with an underscore."""
    page = own_context.new_page()
    faults, others = [], []

    def forward(route: Route) -> None:
        route.continue_(url=route.request.url.replace("/proxy/", "/"))

    def note(address: str) -> None:
        if not address.startswith((f"{keyed.url}/proxy/", "data:", "blob:")):
            others.append(address)

    page.route(f"{keyed.url}/proxy/**", forward)
    page.on("request", lambda request: note(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.set_default_timeout(90_000)  # drawing all operations takes 10 s on a quiet machine
    page.goto(f"{keyed.url}/proxy/docs#/jobs/list_jobs")
    key = create_key("jobs:read")
    page.get_by_role("button", name="Authorize", exact=True).click()
    page.get_by_label("auth-bearer-value").fill(key)
    page.get_by_role("button", name="Apply credentials").click()
    page.get_by_role("button", name="Close", exact=True).click()
    operation = page.locator("#operations-jobs-list_jobs")
    operation.get_by_role("button", name="Execute").click()
    answer = operation.locator(".live-responses-table")
    expect(answer.locator(".response-col_status").last).to_have_text("200")
    expect(operation.locator(".curl-command")).to_contain_text(f"{keyed.url}/proxy/v1/jobs")
    expect(page.locator("html.dark-mode")).to_have_count(0)
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    expect(page.locator("html.dark-mode")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert key not in page.evaluate("JSON.stringify([localStorage, sessionStorage]) + document.cookie")
    assert [fault for fault in faults if "escaping deep link whitespace" not in fault] == []
    assert others == []
