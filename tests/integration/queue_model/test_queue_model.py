"""The queue does what a plain model in memory does, whatever is asked of it and in any order."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable

import pytest
from conftest import EXECUTABLES, RedisServer
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from integration.queue_model.machine import QueueMachine
from integration.queue_model.model import MAX_ATTEMPTS, MAX_QUEUED_JOBS, MAX_QUEUED_JOBS_PER_TENANT

from shared.config.settings import Settings
from shared.queue import Queue, QueueClient, Submission
from shared.queue.connections.pools import connect_commands

STEPS = int(os.environ.get("QUEUE_MODEL_STEPS", "900"))
"""Operations on the first redis-server, a third on each other one; `QUEUE_MODEL_STEPS=10000` is the long form."""

SEED = int(os.environ.get("QUEUE_MODEL_SEED", "1"))
STEPS_PER_EXAMPLE = 60
SHRINK_S = 20


@pytest.mark.every_redis
@pytest.mark.timeout(600)  # the long form; a failing example is shrunk for SHRINK_S
def test_the_queue_agrees_with_a_model_in_memory(
    redis_server: RedisServer,
    settings_for: Callable[..., Settings],
    make_submission: Callable[..., Submission],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prints the operations of a failing example; `QUEUE_MODEL_SEED` replays it. A seed of 0 means a random one."""
    monkeypatch.setattr("hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS", SHRINK_S)
    number = SEED or random.randrange(1, 2**32)
    print(f"QUEUE_MODEL_SEED={number} QUEUE_MODEL_STEPS={STEPS}")
    steps = STEPS if redis_server.executable == EXECUTABLES[min(EXECUTABLES)] else STEPS // 3
    with asyncio.Runner() as runner:
        redis = connect_commands(redis_server.url)

        def machine() -> QueueMachine:
            config = settings_for(
                redis_server.url,
                lease_ms=3_600_000,
                max_attempts=MAX_ATTEMPTS,
                max_queued_jobs=MAX_QUEUED_JOBS,
                max_queued_jobs_per_tenant=MAX_QUEUED_JOBS_PER_TENANT,
            )
            queue = Queue(QueueClient(redis, namespace=config.namespace, settings=config))
            return QueueMachine(runner.run, queue, make_submission)

        options = settings(
            max_examples=max(1, steps // STEPS_PER_EXAMPLE),
            stateful_step_count=STEPS_PER_EXAMPLE,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        try:
            run_state_machine_as_test(seed(number)(machine), settings=options)
        finally:
            runner.run(redis.aclose())
