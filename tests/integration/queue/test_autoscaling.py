"""Autoscaling from measured costs in a real Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.http_server import serving
from harness.queue import claim, put

from shared.job import BatchingStats, Outcome, State
from shared.queue import Queue, WorkerInfo


async def test_the_scale_follows_the_cost_of_jobs_in_a_batch(
    queue: Queue, make_submission: Any, tmp_path: Path
) -> None:
    """A job that cost 40 GPU-seconds solo costs ten if four share a batch: eight queued ones are 80 s, not 320.

    Two workers start them all at once, four each."""
    async with serving(queue, tmp_path, target_wait_s=20.0) as api:
        assert (await api.get("/v1/scale/other")).status_code == 404
        empty = (await api.get(f"/v1/scale/{queue.client.settings.namespace}")).json()
        assert (empty["wanted"], empty["reasons"]) == (0, ["no jobs are queued or running"])
        await put(queue, make_submission())
        (one,) = await claim(queue)
        outcome = Outcome(state=State.SUCCEEDED, batching=BatchingStats(forwards=4, mean_rows=1.0), gpu_seconds=40.0)
        assert await queue.claims.settle("w1", one.job.id, one.epoch, outcome)
        job = one.job
        for rows, seconds in ((1, 1.0), (4, 1.0)):
            await queue.workers.learn_cost("cpu", job.model, f"{job.width}x{job.height}", rows, seconds)
        await put(queue, *(make_submission() for _ in range(8)))
        scale = (await api.get(f"/v1/scale/{queue.client.settings.namespace}")).json()
        assert (scale["backlog_s"], scale["wanted"]) == (pytest.approx(80.0), 2)
        await queue.workers.heartbeat(WorkerInfo(id="w1", models=(job.model,), running_jobs=2))
        scale = (await api.get(f"/v1/scale/{queue.client.settings.namespace}")).json()
        assert (scale["alive"], scale["busy"]) == (1, 1)
        await queue.workers.learn_start_time(70.0)
        await queue.workers.learn_start_time(80.0)
        scale = (await api.get(f"/v1/scale/{queue.client.settings.namespace}")).json()
        assert (scale["start_s"], scale["wanted"]) == (pytest.approx(73.0), 1), "a second one would load for too long"
