"""The clients of a soak: bulk submits of many signatures, polls, cancels and event streams."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable

import httpx

BULK = 250
QUEUED_AT_MOST = 16_000
STREAMS = 40
POLL_S = 0.25
CANCEL_SHARE = 0.02
TIMEOUT_S = 60.0
WIDTHS, HEIGHTS = range(16, 68, 4), range(16, 328, 4)
"""Sizes of the jobs: with two models they make 2,028 signatures."""


def bodies(models: tuple[str, ...], count: int, signatures: int, rng: random.Random) -> list[dict[str, object]]:
    """Return jobs of `signatures` signatures, in random order."""
    kinds = list(itertools.islice(itertools.product(models, WIDTHS, HEIGHTS), signatures))
    chosen = [kinds[at % len(kinds)] for at in range(count)]
    rng.shuffle(chosen)
    priorities = ("standard", "standard", "standard", "bulk", "interactive")
    return [
        {
            "model": model,
            "width": width,
            "height": height,
            "prompt": "a soak",
            "seed": at % 2**24,
            "steps": 2,
            "priority": priorities[at % len(priorities)],
        }
        for at, (model, width, height) in enumerate(chosen)
    ]


class Load:
    """Submits jobs, follows some of them, and waits until none is queued or running."""

    def __init__(self, url: str, seed: int, show: Callable[[str], None]) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False)
        self._random = random.Random(seed)
        self._show = show
        self._recent: list[str] = []
        self.ends: Counter[str] = Counter()
        """Last states that the event streams have shown."""

    async def close(self) -> None:
        await self._http.aclose()

    async def ready(self, workers: int) -> None:
        """Wait until the API responds and all workers are ready."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                rows = (await self._http.get("/v1/workers")).json().get("data", [])
                if sum(row["state"] == "ready" for row in rows) == workers:
                    return
            await asyncio.sleep(POLL_S)
        raise TimeoutError("the workers are not ready")

    async def run(self, jobs: list[dict[str, object]], stop_s: float) -> int:
        """Submit all jobs, or as many as go through within `stop_s`, and wait for the last one; return how many."""
        submitted, started = 0, time.monotonic()
        done = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(STREAMS):
                tasks.create_task(self._follow(done))
            while submitted < len(jobs) and time.monotonic() - started < stop_s:
                if await self.queued() < QUEUED_AT_MOST:
                    some = jobs[submitted : submitted + BULK]
                    self._recent = await self._submit(some)
                    submitted += len(some)
                    if submitted % (20 * BULK) == 0:
                        self._show(f"{submitted:,} of {len(jobs):,} after {time.monotonic() - started:.0f} s")
                    await self._cancel_some()
                else:
                    await asyncio.sleep(POLL_S)
            while await self.queued(running=True):
                await asyncio.sleep(POLL_S)
            done.set()
        return submitted

    async def queued(self, *, running: bool = False) -> int:
        """Return the number of queued jobs and, if wanted, of running ones."""
        rows = (await self._http.get("/v1/queues")).raise_for_status().json()["data"]
        return sum(sum(row["jobs"].values()) + (row["running_jobs"] if running else 0) for row in rows)

    async def _submit(self, jobs: list[dict[str, object]]) -> list[str]:
        text = "\n".join(map(json.dumps, jobs))
        headers = {"content-type": "application/x-ndjson"}
        response = (await self._http.post("/v1/jobs:bulk", content=text, headers=headers)).raise_for_status()
        results = [json.loads(line) for line in response.text.splitlines()]
        ids = [result["id"] for result in results if result.get("id")]
        if len(ids) != len(jobs):
            raise RuntimeError(f"{len(jobs) - len(ids)} of {len(jobs)} jobs were refused: {results[0]}")
        return ids

    async def _cancel_some(self) -> None:
        for job_id in self._random.sample(self._recent, max(1, round(CANCEL_SHARE * len(self._recent)))):
            await self._http.delete(f"/v1/jobs/{job_id}")
            await self._http.get(f"/v1/jobs/{job_id}")

    async def _follow(self, done: asyncio.Event) -> None:
        """Follow one recent job after another by its event stream."""
        while not done.is_set():
            if not self._recent:
                await asyncio.sleep(POLL_S)
                continue
            last = "none"
            with contextlib.suppress(httpx.HTTPError):
                async with self._http.stream("GET", f"/v1/jobs/{self._random.choice(self._recent)}/events") as stream:
                    async for line in stream.aiter_lines():
                        if line.startswith("data: "):
                            last = json.loads(line[6:])["status"]
            self.ends[last] += 1
            if last != "succeeded":  # a deleted job's stream ends at once
                await asyncio.sleep(POLL_S)
