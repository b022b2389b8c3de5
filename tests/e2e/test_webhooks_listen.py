"""`fusequeue webhooks listen` beside a service: the events of jobs on a developer's machine."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import wait_until
from harness.webhook_receiver import receiving

from fusequeue import webhooks


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_events_are_printed_and_forwarded_until_the_command_ends(make_stack: Callable[..., Any], end: int) -> None:
    stack = make_stack(webhook_allow_loopback="1").start(workers=0)
    stack.chores()
    with receiving() as application:
        command = [sys.executable, "-m", "cli.main", "webhooks", "listen", "--port", "0", "--json"]
        command += ["--forward", application.url, "--events", "job.queued,job.canceled", "--url", stack.url]
        listening = stack.add("listen", command).start()
        wait_until(lambda: [line["type"] for line in lines(listening.log)] == ["webhook.test"], "the test event came")
        job = stack.submit(prompt="a red circle")
        stack.client.post(f"/v1/jobs/{job}/cancel")
        wait_until(lambda: len(lines(listening.log)) == 3, "the events of the job came")
    assert {line["type"]: (line["data"]["id"], line["response"]) for line in lines(listening.log)[1:]} == {
        "job.queued": (job, 204),
        "job.canceled": (job, 204),
    }
    secret = stack.read("/v1/webhooks/secret")["secret"]
    for headers, body in application.received:
        assert webhooks.verify(body, headers, secret).data["id"] == job
    assert len(application.received) == 2
    listening.send(end)
    assert listening.process is not None
    assert listening.process.wait(60) == 0
    assert stack.read("/v1/webhooks")["data"] == []


def test_a_service_that_sends_nothing_here_names_the_setting(make_stack: Callable[..., Any]) -> None:
    stack = make_stack().start(workers=0)
    command = [sys.executable, "-m", "cli.main", "webhooks", "listen", "--port", "0", "--url", stack.url]
    listening = stack.add("listen", command).start()
    assert listening.process is not None
    assert listening.process.wait(60) == 2
    assert "FUSEQUEUE_WEBHOOK_ALLOW_LOOPBACK=1" in listening.text()
