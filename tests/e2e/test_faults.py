"""Parts killed, frozen and restarted under load: every acknowledged job ends once."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from datetime import datetime
from typing import Any

import httpx
from waiting import wait_until

PROMPT = "a red circle on a blue ground, left"
LEASE_S = 12.0


def submit_together(stack: Any, count: int, **body: object) -> list[str]:
    """Submit jobs in one piece, so that one worker claims them all."""
    lines = "\n".join(json.dumps({"model": "demo", "prompt": PROMPT, "seed": seed, **body}) for seed in range(count))
    answer = stack.client.post("/v1/jobs:bulk", content=lines, headers={"Content-Type": "application/x-ndjson"})
    return [json.loads(line)["id"] for line in answer.text.splitlines()]


def in_mid_batch(stack: Any, ids: list[str]) -> bool:
    jobs = [stack.job(name) for name in ids]
    return all(job["status"] == "running" and job["progress"]["step"] > 0 for job in jobs)


def holder(stack: Any) -> Any:
    """Return the part of the stack whose worker holds jobs."""
    wait_until(lambda: any(worker["running"] for worker in stack.workers()), "a worker tells that it is at work")
    pids = {worker["pid"] for worker in stack.workers() if worker["running"]}
    return next(part for part in stack.parts if part.process and part.process.pid in pids)


def epoch_s(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def test_the_jobs_of_a_killed_worker_are_made_by_another(make_stack: Any) -> None:
    """`kill -9` in mid-batch: within 1.5 leases another worker has claimed the jobs, and each ends once."""
    stack = make_stack(lease_ms=str(round(1000 * LEASE_S))).start(workers=2)
    ids = submit_together(stack, 3, steps=60)
    wait_until(lambda: in_mid_batch(stack, ids), "the batch is half-way")
    victim = holder(stack)
    victim.kill()
    killed_s = datetime.now().timestamp()
    assert all(stack.job(name)["status"] == "running" for name in ids), "the kill came too late to interrupt anything"
    jobs = [stack.finish(name) for name in ids]
    assert Counter(job["status"] for job in jobs) == {"succeeded": 3}
    assert all(job["attempts"] == 2 for job in jobs)
    assert max(epoch_s(job["started_at"]) for job in jobs) - killed_s < 1.5 * LEASE_S
    assert stack.terminal_events() == dict.fromkeys(ids, 1)


def test_a_worker_frozen_past_its_lease_writes_nothing_when_it_wakes(make_stack: Any) -> None:
    """SIGSTOP until others have made its jobs, then SIGCONT: the records stay as they are, byte for byte."""
    stack = make_stack(lease_ms="2000").start(workers=2)
    ids = submit_together(stack, 3, steps=100, n=2)
    wait_until(lambda: in_mid_batch(stack, ids), "the batch is half-way")
    frozen = holder(stack)
    frozen.send(signal.SIGSTOP)
    jobs = [stack.finish(name) for name in ids]
    assert all(job["status"] == "succeeded" and job["attempts"] == 2 for job in jobs)
    frozen.send(signal.SIGCONT)
    wait_until(lambda: frozen.text().count("job_given_up") + frozen.text().count("job_lost") >= 3, "it has noticed")
    assert [stack.job(name) for name in ids] == jobs
    assert stack.terminal_events() == dict.fromkeys(ids, 1)


class Load:
    """A client that submits one job after another until told to stop, and keeps what was acknowledged."""

    def __init__(self, url: str) -> None:
        self.acknowledged: list[str] = []
        self.refused = 0
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=20) as client:
            seed = 0
            while not self._stop.wait(0.03) and seed < 2000:
                seed += 1
                answer = client.post("/v1/jobs", json={"model": "demo", "prompt": PROMPT, "seed": seed, "steps": 8})
                if answer.status_code == 202:
                    self.acknowledged.append(answer.json()["id"])
                else:
                    assert answer.status_code == 503, answer.text
                    self.refused += 1


def test_redis_killed_and_restarted_under_load_loses_nothing(make_stack: Any) -> None:
    """Every acknowledged job ends once; API and workers come back by themselves."""
    stack = make_stack(lease_ms="4000").start(workers=2)
    with Load(stack.url) as load:
        wait_until(lambda: len(load.acknowledged) > 30, "there is load")
        stack.redis.kill()
        wait_until(lambda: load.refused > 0, "the API says that Redis is away")
        assert stack.client.get("/readyz").status_code == 503
        stack.redis.start()
        before = len(load.acknowledged)
        wait_until(lambda: len(load.acknowledged) > before + 30, "the API takes jobs again")
    jobs = [stack.finish(name) for name in load.acknowledged]
    assert Counter(job["status"] for job in jobs) == {"succeeded": len(jobs)}
    told = stack.terminal_events()
    assert [name for name in load.acknowledged if told[name] != 1] == []


def test_a_drained_worker_gives_back_what_it_cannot_finish(make_stack: Any) -> None:
    """SIGTERM with too little time: the jobs are another's at once, not after a lease, and no loss is counted."""
    stack = make_stack(lease_ms="60000", drain_timeout_s="0.2").start(workers=1)
    leaving = stack.parts[-1]
    ids = submit_together(stack, 3, steps=100, n=4)
    wait_until(lambda: in_mid_batch(stack, ids), "the batch is half-way")
    assert leaving.stop() == 0
    assert all(stack.job(name)["status"] == "queued" for name in ids)
    stack.worker()
    jobs = [stack.finish(name, 50) for name in ids]
    assert Counter(job["status"] for job in jobs) == {"succeeded": 3}
    assert max(job["fusing"]["max_jobs"] for job in jobs) > 1, "a job given back need not run alone"
