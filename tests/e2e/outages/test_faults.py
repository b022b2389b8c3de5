"""Processes killed, frozen and restarted under load: every acknowledged job ends once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from harness.waiting import wait_until
from tiny import registry

from shared.queue.redis_keys import RedisKeys

PROMPT = "a red circle on a blue ground, left"
PAUSE = "/v1/pauses/models/demo"
ATTEMPTS = 5
SLICE_S = 0.05
EXIT_HUNG = 70  # of worker/worker.py


def submit_together(stack: Any, count: int, **body: object) -> list[str]:
    """Submit jobs while their model is paused, so that one worker claims them all when it is resumed."""
    stack.client.put(PAUSE, json={"reason": "until all are queued"}).raise_for_status()
    lines = "\n".join(json.dumps({"model": "demo", "prompt": PROMPT, "seed": seed, **body}) for seed in range(count))
    response = stack.client.post("/v1/jobs:bulk", content=lines, headers={"Content-Type": "application/x-ndjson"})
    stack.client.delete(PAUSE).raise_for_status()
    return [json.loads(line)["id"] for line in response.text.splitlines()]


def stop_in_mid_batch(stack: Any, **body: object) -> tuple[list[str], Any]:
    """Return jobs in the middle of their steps, and their worker, stopped (SIGSTOP) together with its engine.

    All engines are stopped until the jobs are claimed; then theirs runs in short slices. If the jobs end before they
    are seen in the middle, others are submitted, of another size: the forwards of the first ones, which took longer as
    their engine was stopped, bound the batches of theirs.
    """
    workers = {process.process.pid: process for process in stack.processes if process.name.startswith("worker")}
    engines = {pid: engine_of(worker) for pid, worker in workers.items()}
    for attempt in range(ATTEMPTS):
        signal_all(engines.values(), signal.SIGSTOP)
        ids = submit_together(stack, 3, width=64 + 8 * attempt, **body)
        wait_until(lambda ids=ids: None not in worker_pids(stack, ids), "the jobs are claimed")
        pids = set(worker_pids(stack, ids))
        pid = pids.pop()
        while not pids and not in_progress(stack, ids) and not ended(stack, ids):
            os.kill(engines[pid], signal.SIGCONT)
            time.sleep(SLICE_S)
            os.kill(engines[pid], signal.SIGSTOP)
            time.sleep(SLICE_S)  # its progress is written within this time, or seen after the next slice
        workers[pid].send(signal.SIGSTOP)
        if not pids and in_progress(stack, ids):
            signal_all(set(engines.values()) - {engines[pid]}, signal.SIGCONT)
            return ids, workers[pid]
        signal_all((pid, *engines.values()), signal.SIGCONT)
        for name in ids:
            stack.finish(name)
    raise AssertionError(f"no batch was seen in progress in {ATTEMPTS} attempts")


def resume(worker: Any) -> None:
    """Resume a stopped worker and its engine (SIGCONT)."""
    signal_all((worker.process.pid, engine_of(worker)), signal.SIGCONT)


def signal_all(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def engine_of(worker: Any) -> int:
    """Return the process id of a worker's engine."""
    pid = worker.process.pid
    (engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(engine)


def in_progress(stack: Any, ids: list[str]) -> bool:
    jobs = [stack.job(name) for name in ids]
    return all(job["status"] == "running" and job["progress"]["step"] > 0 for job in jobs)


def ended(stack: Any, ids: list[str]) -> bool:
    return any(stack.job(name)["status"] not in ("queued", "running") for name in ids)


def worker_pids(stack: Any, ids: list[str]) -> list[int | None]:
    """Return the worker process of each job, None if unclaimed."""
    with redis.Redis(port=stack.redis_port, decode_responses=True) as client:
        names = [client.hget(RedisKeys("default").job(name), "worker") for name in ids]
    return [int(name.rsplit("-", 2)[1]) if name else None for name in names]


def expire_leases(stack: Any, ids: list[str]) -> None:
    """Set the leases to expired."""
    with redis.Redis(port=stack.redis_port) as client:
        assert client.zadd(RedisKeys("default").leases, dict.fromkeys(ids, 1), xx=True, ch=True) == len(ids)


def test_the_jobs_of_a_killed_worker_are_run_by_another(make_stack: Any) -> None:
    """After `kill -9` in mid-batch another worker claims each when its lease has expired; each ends once."""
    stack = make_stack(lease_ms="12000").start(workers=2)
    ids, victim = stop_in_mid_batch(stack, steps=20)
    engine = engine_of(victim)
    victim.kill()
    jobs = [stack.finish(name) for name in ids]
    assert Counter(job["status"] for job in jobs) == {"succeeded": 3}
    assert all(job["attempts"] == 2 for job in jobs)
    terminal_events = stack.terminal_events()
    assert {name: terminal_events[name] for name in ids} == dict.fromkeys(ids, 1)
    wait_until(lambda: not Path(f"/proc/{engine}").exists(), "its engine has ended too")


def test_a_worker_whose_engine_is_killed_exits_and_another_runs_its_jobs(make_stack: Any) -> None:
    """For example by the OOM killer. It counts as a lost attempt, which bounds jobs that kill their engine."""
    stack = make_stack().start(workers=2)
    ids, victim = stop_in_mid_batch(stack, steps=20)
    os.kill(engine_of(victim), signal.SIGKILL)
    victim.send(signal.SIGCONT)
    assert victim.process.wait(60) == EXIT_HUNG
    assert "engine_process_ended" in victim.text()
    jobs = [stack.finish(name) for name in ids]
    assert all(job["status"] == "succeeded" and job["attempts"] == 2 for job in jobs)
    terminal_events = stack.terminal_events()
    assert {name: terminal_events[name] for name in ids} == dict.fromkeys(ids, 1)


TWO_DEVICES = """
[[model]]
id = "demo"
source = "{source}"
devices = 2
defaults = {{width = 64, height = 64}}
limits = {{multiple_of = 16}}
"""


@pytest.mark.slow
def test_the_jobs_of_a_model_over_two_devices_are_run_elsewhere_when_a_rank_is_killed(
    make_stack: Any, tmp_path: Path
) -> None:
    """In mid-forward: its engine ends, its worker exits, and the other worker runs each job once."""
    source = registry.save_tiny("flux", tmp_path / "flux")
    models = tmp_path / "models.toml"
    models.write_text(TWO_DEVICES.format(source=source))
    stack = make_stack(models=str(models)).start(workers=2)
    ids, victim = stop_in_mid_batch(stack, steps=150)
    engine = engine_of(victim)
    (rank,) = ranks_of(engine)
    os.kill(rank, signal.SIGKILL)
    resume(victim)
    assert victim.process.wait(60) == EXIT_HUNG
    assert "rank_ended" in victim.text()
    jobs = [stack.finish(name) for name in ids]
    assert all(job["status"] == "succeeded" and job["attempts"] == 2 for job in jobs)
    terminal_events = stack.terminal_events()
    assert {name: terminal_events[name] for name in ids} == dict.fromkeys(ids, 1)
    wait_until(lambda: not Path(f"/proc/{engine}").exists(), "its engine has ended too")
    (worker,) = (one for one in stack.processes if one.name.startswith("worker") and one is not victim)
    (rank,) = ranks_of(engine_of(worker))
    worker.kill()
    wait_until(lambda: not Path(f"/proc/{rank}").exists(), "the rank of a killed worker has ended")


def ranks_of(engine: int) -> list[int]:
    """Return the process ids of the ranks that an engine's threads have started."""
    children = (file.read_text().split() for file in Path(f"/proc/{engine}/task").glob("*/children"))
    return [int(pid) for pids in children for pid in pids]


def test_a_worker_frozen_past_its_lease_writes_nothing_when_it_resumes(make_stack: Any) -> None:
    """SIGSTOP until others have run its jobs, then SIGCONT: the records do not change."""
    stack = make_stack().start(workers=2)
    ids, frozen = stop_in_mid_batch(stack, steps=20)
    expire_leases(stack, ids)
    jobs = [stack.finish(name) for name in ids]
    assert all(job["status"] == "succeeded" and job["attempts"] == 2 for job in jobs)
    resume(frozen)
    wait_until(
        lambda: frozen.text().count("claim_abandoned") + frozen.text().count("job_lost") >= 3, "it has noticed the loss"
    )
    assert [stack.job(name) for name in ids] == jobs
    terminal_events = stack.terminal_events()
    assert {name: terminal_events[name] for name in ids} == dict.fromkeys(ids, 1)


class SubmitLoop:
    """A client that submits jobs until stopped and records the acknowledged ones."""

    def __init__(self, url: str) -> None:
        self.acknowledged: list[str] = []
        self.refused = 0
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> SubmitLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as client:
            seed = 0
            while not self._stop.wait(0.03) and seed < 2000:
                seed += 1
                response = client.post("/v1/jobs", json={"model": "demo", "prompt": PROMPT, "seed": seed, "steps": 8})
                if response.status_code == 202:
                    self.acknowledged.append(response.json()["id"])
                else:
                    assert response.status_code == 503, response.text
                    self.refused += 1


@pytest.mark.slow
def test_redis_killed_and_restarted_under_load_loses_nothing(make_stack: Any) -> None:
    """Every acknowledged job ends once; API and workers recover. As chaos runs do, with an engine that computes."""
    stack = make_stack(lease_ms="4000").start(workers=2)
    with SubmitLoop(stack.url) as load:
        wait_until(lambda: len(load.acknowledged) > 30, "there is load")
        stack.redis.kill()
        wait_until(lambda: load.refused > 0, "the API refuses jobs")
        wait_until(lambda: not stack.ready(), "the API is not ready")
        stack.redis.start()
        before = len(load.acknowledged)
        wait_until(lambda: len(load.acknowledged) > before + 30, "the API accepts jobs again")
    jobs = [stack.finish(name) for name in load.acknowledged]
    assert Counter(job["status"] for job in jobs) == {"succeeded": len(jobs)}
    terminal_events = stack.terminal_events()
    assert [name for name in load.acknowledged if terminal_events[name] != 1] == []


def test_a_drained_worker_releases_jobs_it_cannot_finish(make_stack: Any) -> None:
    """With a short drain timeout the jobs are queued at once, not after a lease, and no lost attempt is counted."""
    stack = make_stack(lease_ms="60000", drain_timeout_s="0.05").start(workers=1)
    ids, draining = stop_in_mid_batch(stack, steps=30, n=2)
    draining.send(signal.SIGTERM)
    resume(draining)
    assert draining.process.wait(60) == 0
    assert all(stack.job(name)["status"] == "queued" for name in ids)
    stack.worker()
    jobs = [stack.finish(name) for name in ids]
    assert Counter(job["status"] for job in jobs) == {"succeeded": 3}
    assert max(job["batching"]["max_jobs"] for job in jobs) > 1, "a released job can run with batch mates"
