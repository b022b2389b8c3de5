"""The rq worker of the chores."""

from __future__ import annotations

import pytest
from fakeredis import FakeStrictRedis
from redis.exceptions import ConnectionError as ConnectionLost
from rq.worker import base

from api.chores.rq_worker import RqWorker


def test_an_idle_queue_reconnects_soon_after_many_lost_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    connections = iter([False] * 10)

    def dequeue(*_: object, **__: object) -> None:
        if next(connections, True) is False:
            raise ConnectionLost("closed by the server")

    worker = RqWorker(["webhooks"], connection=FakeStrictRedis())
    monkeypatch.setattr(base.time, "sleep", waits.append)
    monkeypatch.setattr(worker.queue_class, "dequeue_any", dequeue)
    assert worker.dequeue_job_and_maintain_ttl(1) is None
    assert len(waits) == 10
    assert max(waits) <= 2
