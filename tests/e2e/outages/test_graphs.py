"""Jobs that wait for others, while their worker is killed and one of them fails."""

from __future__ import annotations

import io
import json
import shutil
import signal
from datetime import datetime
from typing import Any

from harness.waiting import wait_until
from PIL import Image

PROMPT = "a red circle on a blue ground, left"
WIDTH = 20


def bulk(stack: Any, *bodies: dict[str, Any]) -> list[str]:
    """Submit jobs in one request, and return their ids."""
    lines = "\n".join(json.dumps({"model": "demo", "prompt": PROMPT, "steps": 20, **body}) for body in bodies)
    response = stack.client.post("/v1/jobs:bulk", content=lines, headers={"Content-Type": "application/x-ndjson"})
    return [json.loads(line)["id"] for line in response.raise_for_status().text.splitlines()]


def upload_image(stack: Any) -> str:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    response = stack.client.post("/v1/inputs", files={"file": ("red.png", file.getvalue())})
    return str(response.raise_for_status().json()["id"])


def kill_while_it_runs_some(stack: Any, worker: Any) -> None:
    """Kill a worker (SIGKILL) while it has jobs; stopped, it cannot end them."""

    def holds_jobs() -> bool:
        worker.send(signal.SIGSTOP)
        if stack.read("/v1/jobs", status="running")["data"]:
            return True
        worker.send(signal.SIGCONT)
        return False

    wait_until(holds_jobs, "the worker has jobs")
    worker.kill()


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_a_graph_ends_for_the_right_reasons_though_its_worker_is_killed_and_a_job_fails(make_stack: Any) -> None:
    """A job, 20 children and 20 grandchildren: those of the failed child fail, but for one that is to run anyway."""
    stack = make_stack(lease_ms="4000").start(workers=0)
    (root,) = bulk(stack, {})
    image = upload_image(stack)
    children = bulk(stack, {"after": [root], "image": image}, *[{"after": [root]}] * (WIDTH - 1))
    both = {"after": children[:2]}
    bodies = [both, {**both, "on_parent_failure": "run"}, *({"after": [child]} for child in children[2:])]
    grandchildren = bulk(stack, *bodies)
    shutil.rmtree(stack.folder / "storage" / "inputs")  # the first child fails
    first = stack.worker()
    stack.finish(root)
    kill_while_it_runs_some(stack, first)
    stack.worker()
    jobs = {job_id: stack.finish(job_id) for job_id in (root, *children, *grandchildren)}
    failed = {job_id: job["error"] for job_id, job in jobs.items() if job["status"] != "succeeded"}
    assert failed.keys() == {children[0], grandchildren[0]}, failed
    assert failed[children[0]]["code"] == "input_missing"
    assert failed[grandchildren[0]]["code"] == "parent_failed"
    assert children[0] in failed[grandchildren[0]]["message"]
    assert max(job["attempts"] for job in jobs.values()) == 2, "a worker was killed in the middle"
    for job in jobs.values():
        ends = [moment(jobs[parent]["finished_at"]) for parent in job["after"]]
        assert job["started_at"] is None or all(end <= moment(job["started_at"]) for end in ends), job
    assert jobs[grandchildren[0]]["started_at"] is None
    assert stack.terminal_events() == dict.fromkeys(jobs, 1)
