"""`fusequeue pool`: workers start and stop with the load, and no job is lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import ROOT
from harness.waiting import wait_until

BURST = 40


def rows(log: Path) -> list[dict[str, float]]:
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def worker_count(row: dict[str, float]) -> float:
    return row["ready"] + row["starting"]


@pytest.mark.timeout(240)
def test_a_burst_starts_two_workers_which_stop_after_it(make_stack: Callable[..., Any], tmp_path: Path) -> None:
    """Each job runs once. Before the first one has ended, the models file says what an image costs."""
    models = tmp_path / "models.toml"
    text = (ROOT / "models.toml").read_text().replace('"demo/model"', f'"{ROOT / "demo/model"}"')
    models.write_text(text.replace("# expected_image_s = 4.0", "expected_image_s = 4.0"))
    stack = make_stack(target_wait_s="0.5", models=str(models)).start(workers=0)
    log, plot = stack.folder / "pool.jsonl", stack.folder / "pool.svg"
    options = ("--max", "2", "--cool-down-s", "1", "--poll-interval-s", "0.2", "--data-dir", str(stack.folder / "data"))
    command = [sys.executable, "-m", "cli.main", "pool", *options, "--log", str(log), "--plot", str(plot)]
    pool = stack.add("pool", [*command, "--url", stack.url]).start()
    wait_until(lambda: rows(log), "the pool polls")
    assert worker_count(rows(log)[-1]) == 0

    body = {"model": "demo", "prompt": "a red circle on a blue ground, left", "steps": 2}
    lines = "".join(json.dumps({**body, "seed": seed}) + "\n" for seed in range(BURST))
    headers = {"Content-Type": "application/x-ndjson", "Idempotency-Key": "burst"}
    response = stack.client.post("/v1/jobs:bulk", content=lines, headers=headers)
    ids = [json.loads(line)["id"] for line in response.text.splitlines()]
    jobs = [stack.finish(job_id) for job_id in ids]
    wait_until(lambda: worker_count(rows(log)[-1]) == 0 and not rows(log)[-1]["draining"], "the pool is empty")
    assert len(jobs) == BURST
    assert [(job["status"], job["attempts"]) for job in jobs] == [("succeeded", 1)] * BURST
    assert {stack.terminal_events()[job_id] for job_id in ids} == {1}
    assert max(worker_count(row) for row in rows(log)) == 2
    first = next(row for row in rows(log) if row["queued"] or worker_count(row))
    assert worker_count(first) > 0, "workers start at the first poll with queued jobs"

    assert pool.stop() == 0
    assert "</svg>" in plot.read_text()
