"""`fusequeue pool`: workers come with the jobs and go with them, and nothing is lost on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import wait_until

BURST = 60


def rows(log: Path) -> list[dict[str, float]]:
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def present(row: dict[str, float]) -> float:
    return row["ready"] + row["starting"]


@pytest.mark.timeout(240)
def test_from_zero_to_two_and_back_and_no_job_twice(make_stack: Callable[..., Any]) -> None:
    """A burst wakes two workers, which leave when it is done; each job ran once."""
    stack = make_stack(target_wait_s="0.5").start(workers=0)
    log, plot = stack.folder / "pool.jsonl", stack.folder / "pool.svg"
    options = ("--max", "2", "--cool-down-s", "1", "--poll-interval-s", "0.2", "--data-dir", str(stack.folder / "data"))
    command = [sys.executable, "-m", "cli.main", "pool", *options, "--log", str(log), "--plot", str(plot)]
    pool = stack._part("pool", [*command, "--url", stack.url]).start()
    wait_until(lambda: rows(log), "the pool looks")
    assert present(rows(log)[-1]) == 0

    body = {"model": "demo", "prompt": "a red circle on a blue ground, left", "steps": 2}
    lines = "".join(json.dumps({**body, "seed": seed}) + "\n" for seed in range(BURST))
    headers = {"Content-Type": "application/x-ndjson", "Idempotency-Key": "burst"}
    answer = stack.client.post("/v1/jobs:bulk", content=lines, headers=headers)
    ids = [json.loads(line)["id"] for line in answer.text.splitlines()]
    jobs = [stack.finish(job_id) for job_id in ids]
    wait_until(lambda: present(rows(log)[-1]) == 0 and not rows(log)[-1]["draining"], "the pool is empty again")
    assert len(jobs) == BURST
    assert [(job["status"], job["attempts"]) for job in jobs] == [("succeeded", 1)] * BURST
    assert {stack.terminal_events()[job_id] for job_id in ids} == {1}
    assert max(present(row) for row in rows(log)) == 2
    woken = next(row for row in rows(log) if row["queued"] or present(row))
    assert present(woken) > 0, "it acts as soon as it sees what waits"

    assert pool.stop() == 0
    assert "</svg>" in plot.read_text()
