"""What operators see and change of other tenants in a browser: their jobs, limits and keys."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from harness.axe import check
from playwright.sync_api import Page, expect


def enter(page: Page, key: str) -> Page:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use this key").click()
    return page


@pytest.fixture(scope="module")
def acme(keyed: Any, create_tenant_key: Any) -> Any:
    """A client of the tenant acme, with a paused model, so that its jobs wait."""
    keyed.client.put("/v1/pauses/tenants/acme", json={"reason": "its jobs wait"})
    key = create_tenant_key("acme", "jobs:read,jobs:write")
    with httpx.Client(base_url=keyed.url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        yield client
    keyed.client.delete("/v1/pauses/tenants/acme")


def submit(client: Any, prompt: str) -> str:
    response = client.post("/v1/jobs", json={"model": "demo", "prompt": prompt})
    return str(response.json()["id"])


def test_an_operator_reads_and_changes_the_jobs_of_a_tenant(
    open_page: Any, keyed: Any, create_key: Any, acme: Any
) -> None:
    first, second = submit(acme, "a circle of acme"), submit(acme, "a square of acme")
    page = enter(open_page(keyed.url, "#/jobs"), create_key("jobs:read,admin"))
    expect(page.get_by_role("heading", level=1, name="Jobs")).to_be_visible()
    expect(page.get_by_text("a circle of acme")).to_have_count(0)
    page.get_by_role("combobox", name="Tenant").fill("acme")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("link", name="a circle of acme").click()
    expect(page.locator(".job-head")).to_contain_text(first)
    expect(page.get_by_role("link", name="Duplicate and edit")).to_have_count(0)
    page.get_by_role("button", name="Priority").click()
    page.get_by_role("dialog").get_by_label("Priority").select_option("bulk")
    page.get_by_role("dialog").get_by_role("button", name="Change").click()
    expect(page.get_by_text("Changed the priority").first).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".job-head .badge")).to_have_text("canceled")
    expect(page.locator(".events")).to_contain_text("canceled")
    assert acme.get(f"/v1/jobs/{first}").json()["priority"] == "bulk"
    page.get_by_role("main").get_by_role("link", name="Jobs", exact=True).click()
    page.get_by_role("checkbox", name=f"Select {second}").click()
    page.get_by_role("button", name="Cancel 1").click()
    expect(page.get_by_text("Canceled 1 job").first).to_be_visible()
    assert acme.get(f"/v1/jobs/{second}").json()["status"] == "canceled"


def test_all_jobs_of_a_tenant_that_match_are_changed_and_no_others(
    open_page: Any, keyed: Any, create_key: Any, acme: Any
) -> None:
    """With a key of the scope admin alone, which reads no jobs of its own tenant without its name."""
    theirs = submit(acme, "a ring of acme")
    own = keyed.submit(prompt="a ring of the operator", steps=100)
    page = enter(open_page(keyed.url, "#/jobs?tenant=acme&prompt=ring"), create_key("admin"))
    page.get_by_role("button", name="Cancel all matching").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel 1 job").click()
    expect(page.get_by_text("Canceled 1 job").first).to_be_visible()
    assert acme.get(f"/v1/jobs/{theirs}").json()["status"] == "canceled"
    assert keyed.finish(own)["status"] == "succeeded"
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_text("a ring of the operator")).to_be_visible()


def test_other_keys_are_offered_no_tenants(open_page: Any, keyed: Any, create_key: Any) -> None:
    page = enter(open_page(keyed.url, "#/jobs"), create_key("jobs:read,jobs:write"))
    expect(page.get_by_role("heading", level=1, name="Jobs")).to_be_visible()
    expect(page.get_by_role("textbox", name="Prompt")).to_be_visible()
    expect(page.get_by_role("combobox", name="Tenant")).to_have_count(0)


def test_limits_are_changed_with_what_is_wrong_at_its_field(
    open_page: Any, keyed: Any, create_key: Any, acme: Any
) -> None:
    page = enter(open_page(keyed.url, "#/tenants"), create_key("admin"))
    page.get_by_role("button", name="Limits of acme").click()
    dialog = page.get_by_role("dialog", name="Limits of acme")
    expect(dialog.get_by_role("button", name="Change")).to_be_disabled()
    slots = dialog.get_by_role("textbox", name="Running slots")
    slots.fill("0")
    dialog.get_by_role("textbox", name="Queued jobs").fill("7")
    dialog.get_by_role("button", name="Change").click()
    faulty = dialog.locator(".is-faulty").filter(has_text="Running slots")
    expect(faulty.get_by_role("alert")).to_contain_text("running_slots")
    assert limits_of(keyed, "acme") == {}, "nothing before all are valid"
    slots.fill("3")
    expect(dialog.get_by_role("alert")).to_have_count(0)
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    assert limits_of(keyed, "acme") == {"queued_jobs": 7, "running_slots": 3}
    row = page.get_by_role("row").filter(has=page.get_by_role("button", name="Models of acme"))
    expect(row).to_contain_text("of 7")
    page.get_by_role("button", name="Limits of acme").click()
    for name in ("Running slots", "Queued jobs"):
        dialog.get_by_role("textbox", name=name).fill("")
    dialog.get_by_role("button", name="Change").click()
    expect(dialog).to_have_count(0)
    assert limits_of(keyed, "acme") == {}


def limits_of(keyed: Any, name: str) -> dict[str, int]:
    (tenant,) = keyed.read("/v1/tenants", name=name)["data"]
    return {limit: tenant["limits"][limit] for limit in tenant["own_limits"]}


def test_a_key_is_revoked_after_a_question(open_page: Any, keyed: Any, create_key: Any, create_tenant_key: Any) -> None:
    token = create_tenant_key("studio", "jobs:read")
    page = enter(open_page(keyed.url, "#/keys"), create_key("admin"))
    page.get_by_role("combobox", name="Tenant").fill("studio")
    page.keyboard.press("Enter")
    row = page.get_by_role("row").filter(has=page.get_by_role("cell", name="jobs:read"))
    expect(row).to_contain_text(token[:13])
    assert token not in page.content()
    page.get_by_role("button", name=f"Revoke {token[:13]}").click()
    assert keyed.read("/v1/keys", tenant="studio")["data"][0]["state"] == "active", "nothing before the confirmation"
    page.get_by_role("dialog").get_by_role("button", name="Revoke", exact=True).click()
    expect(row.locator(".badge")).to_have_text("revoked")
    expect(page.get_by_role("button", name=f"Revoke {token[:13]}")).to_have_count(0)
    assert keyed.read("/v1/keys", tenant="studio")["data"][0]["state"] == "revoked"


def test_a_page_whose_own_key_is_revoked_asks_for_another(open_page: Any, keyed: Any, create_key: Any) -> None:
    key = create_key("admin")
    page = enter(open_page(keyed.url, "#/keys"), key)
    page.get_by_role("button", name=f"Revoke {key[:13]}").click()
    expect(page.get_by_role("dialog")).to_contain_text("This page uses it")
    page.get_by_role("dialog").get_by_role("button", name="Revoke", exact=True).click()
    expect(page.get_by_label("API key")).to_be_visible()
    expect(page.get_by_role("dialog")).to_contain_text("no longer valid")


def test_a_key_is_created_and_shown_once(open_page: Any, keyed: Any, create_key: Any) -> None:
    page = enter(open_page(keyed.url, "#/keys"), create_key("admin,keys:create"))
    page.get_by_role("button", name="Create a key").click()
    dialog = page.get_by_role("dialog", name="Create a key")
    check(page, "dark")
    dialog.get_by_role("combobox", name="Tenant").fill("A studio")
    dialog.get_by_role("checkbox", name="jobs:write").uncheck()
    dialog.get_by_role("textbox", name="Name").fill("a laptop")
    dialog.get_by_role("combobox", name="Expires").select_option(label="in 30 days")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog.locator(".is-faulty").get_by_role("alert")).to_contain_text("tenant")
    dialog.get_by_role("combobox", name="Tenant").fill("new-studio")
    page.keyboard.press("Enter")
    shown = page.get_by_role("dialog", name="The key of new-studio")
    key = shown.locator(".secret code").inner_text()
    check(page, "light")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(shown.get_by_role("button", name="Copy the key")).to_be_visible()
    shown.get_by_role("button", name="I have stored it").click()
    row = page.get_by_role("row").filter(has_text="new-studio")
    check(page, "light", "dark")
    expect(row).to_contain_text("a laptop")
    assert key[13:] not in page.content()
    with httpx.Client(base_url=keyed.url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        assert client.get("/v1/jobs").json()["data"] == []
        assert client.post("/v1/jobs", json={"model": "demo", "prompt": "x"}).status_code == 403
    (listed,) = keyed.read("/v1/keys", tenant="new-studio")["data"]
    assert (listed["scopes"], listed["expires_at"] is None) == (["jobs:read"], False)


def test_a_key_that_creates_none_is_offered_the_command(open_page: Any, keyed: Any, create_key: Any) -> None:
    page = enter(open_page(keyed.url, "#/keys"), create_key("admin,jobs:read,jobs:write"))
    expect(page.get_by_text("fusequeue keys create", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Create a key")).to_have_count(0)
