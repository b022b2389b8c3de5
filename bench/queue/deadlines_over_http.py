"""The part of `python -m bench.queue.deadlines` with real processes: the demo model behind `fusequeue up`."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.common.clients import LightClient, light_client
from bench.common.record import ROOT
from bench.over_http import MODELS_FILE, up
from bench.queue.deadline_mix import LOOSE, TIGHT, DeadlineMix, share

ROWS = 8
SIDES = {64: 0.7, 96: 0.3}
"""The sizes of jobs, so their signatures, with their shares."""

STEPS = (20, 28, 40)
WARM_UP = 192  # jobs of each size
EDGE = 32  # of these, the first and last are not counted: their batches are not full
TURNS = 2
ENDED = ("succeeded", "failed", "canceled", "expired")


@dataclass(frozen=True)
class SentJob:
    """Whether a job has ended within its time limit (None without one), and its seconds until the end."""

    limit_s: float | None
    seconds: float
    met: bool


def body(rng: random.Random, side: int | None = None) -> dict[str, object]:
    """Return a job of this size, or of one of the sizes."""
    side = side or rng.choices(list(SIDES), list(SIDES.values()))[0]
    fields = {"width": side, "height": side, "steps": rng.choice(STEPS), "seed": rng.randrange(1000)}
    return {"model": "demo", "prompt": "a red circle on a blue ground, left", **fields}


async def until_ended(http: LightClient, job: dict[str, Any]) -> dict[str, Any]:
    while job["status"] not in ENDED:
        job = json.loads(await http.get(f"/v1/jobs/{job['id']}?wait=30"))
    return job


async def capacity(http: LightClient, rng: random.Random) -> float:
    """Return the jobs per second of a worker with full batches: one size after the other, as each change costs rows."""
    seconds = 0.0
    for side, part in SIDES.items():
        jobs = [await http.post("/v1/jobs", body(rng, side)) for _ in range(WARM_UP)]
        ended = [await until_ended(http, job) for job in jobs]
        ends = sorted(datetime.fromisoformat(job["finished_at"]).timestamp() for job in ended)[EDGE:-EDGE]
        seconds += part * (ends[-1] - ends[0]) / (len(ends) - 1)
    return 1 / seconds


async def send(http: LightClient, fields: dict[str, object], limit_s: float | None, by_slack: bool) -> SentJob:
    """Submit a job and wait for its end; by priority and age it is canceled at its deadline instead of expiring."""
    if by_slack and limit_s is not None:
        fields = {**fields, "deadline_s": limit_s}
    job = await http.post("/v1/jobs", fields)
    if not by_slack and limit_s is not None:
        try:
            async with asyncio.timeout(limit_s):
                job = await until_ended(http, job)
        except TimeoutError:
            await http.post(f"/v1/jobs/{job['id']}/cancel", {})
    job = await until_ended(http, job)
    created, finished = (datetime.fromisoformat(job[name]) for name in ("created_at", "finished_at"))
    seconds = (finished - created).total_seconds()
    return SentJob(limit_s, seconds, job["status"] == "succeeded" and seconds <= (limit_s or 0.0))


async def turn(http: LightClient, mix: DeadlineMix, rate: float, by_slack: bool) -> list[SentJob]:
    """Send the jobs of one turn at their times."""
    rng, started, tasks = random.Random(mix.seed), time.perf_counter(), []
    async with asyncio.TaskGroup() as group:
        for at_s, limit_s in mix.arrivals(rate, ROWS):
            await asyncio.sleep(max(0.0, started + at_s - time.perf_counter()))
            tasks.append(group.create_task(send(http, body(rng), limit_s, by_slack)))
    return [task.result() for task in tasks]


async def measure_processes(folder: Path, mix: DeadlineMix) -> list[dict[str, Any]]:
    """Return the shares of deadlines met in either order, over turns with the same jobs."""
    models = folder / "models.toml"
    source = ROOT / "demo" / "model"
    models.write_text(MODELS_FILE.format(model="demo", source=source, rows=ROWS, side=min(SIDES)), "utf-8")
    sent: dict[bool, list[SentJob]] = {False: [], True: []}
    with up(folder, "--models", str(models)) as url:
        async with light_client(url) as http:
            rng = random.Random(mix.seed)
            await capacity(http, rng)  # loads the model
            rate = await capacity(http, rng)
            for number in range(TURNS):
                for by_slack in (False, True) if number % 2 else (True, False):
                    sent[by_slack] += await turn(http, replace(mix, seed=mix.seed + number), rate, by_slack)
    return [_figures(mix, rate, by_slack, jobs) for by_slack, jobs in sent.items()]


def _figures(mix: DeadlineMix, rate: float, by_slack: bool, jobs: list[SentJob]) -> dict[str, Any]:
    dated = [job for job in jobs if job.limit_s is not None]
    middle_s = ROWS / rate * (TIGHT + LOOSE) / 2
    return {
        "model": "demo",
        "order": "slack" if by_slack else "priority and age",
        "load": mix.load,
        "jobs": len(jobs),
        "jobs_per_second": round(mix.load * rate, 2),
        "met": share(job.met for job in dated),
        "tight_met": share(job.met for job in dated if (job.limit_s or 0.0) < middle_s),
        "loose_met": share(job.met for job in dated if (job.limit_s or 0.0) > middle_s),
        "without_mean_s": round(statistics.mean(job.seconds for job in jobs if job.limit_s is None), 2),
    }
