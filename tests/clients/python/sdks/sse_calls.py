"""httpx-sse on the events of a job."""

from __future__ import annotations

from typing import Any

import checks
import httpx
from checks import KEY, MODEL, PROMPT, call, request, same
from httpx_sse import connect_sse


def submit() -> dict[str, Any]:
    """Submit a job and return it."""
    job: dict[str, Any] = request("POST", "/v1/jobs", {"model": MODEL, "prompt": PROMPT, "steps": 40})
    return job


def events(url: str, **headers: str) -> list[Any]:
    with httpx.Client(timeout=60) as client, connect_sse(client, "GET", url, headers=headers) as source:
        return list(source.iter_sse())


def check(found: list[Any], job_id: str) -> None:
    assert {event.event for event in found} <= {"state", "progress"}
    assert found[0].retry, "no `retry` in the first event"
    same((found[-1].json()["id"], found[-1].json()["status"]), (job_id, "succeeded"))
    steps = [event.json()["progress"]["step"] for event in found if event.event == "progress"]
    same(steps, sorted(steps))


@call("connect_sse with a signed URL")
def signed() -> None:
    job = submit()
    check(events(job["urls"]["events"]), job["id"])


@call("connect_sse with a key, resumed after an event")
def resumed() -> None:
    job = submit()
    url, key = job["urls"]["events"].partition("?")[0], f"Bearer {KEY}"
    found = events(url, Authorization=key)
    check(found, job["id"])
    first = next(event for event in found if event.id)
    later = events(url, **{"Authorization": key, "Last-Event-ID": first.id})
    assert first.id not in [event.id for event in later]
    same(later[-1].json()["status"], "succeeded")


checks.main()
