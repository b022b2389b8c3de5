"""A worker's HTTP port: health, readiness and metrics."""

from __future__ import annotations

import socket

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.errors import ConfigurationError
from shared.runtime import metrics
from worker.metrics.http_port import http_port


class WorkerStub:
    def __init__(self) -> None:
        self.reason: str | None = "the worker is starting"
        self.refreshed = 0

    def unready(self) -> str | None:
        return self.reason

    async def refresh_metrics(self) -> None:
        self.refreshed += 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_port_serves_health_readiness_and_metrics() -> None:
    """Healthy from the start, ready with the worker; a scrape refreshes the metrics first."""
    port, worker = free_port(), WorkerStub()
    url = f"http://127.0.0.1:{port}"
    async with http_port("127.0.0.1", port, worker), httpx.AsyncClient(base_url=url, timeout=5) as client:
        assert (await client.get("/healthz")).status_code == 200
        unready = await client.get("/readyz")
        assert (unready.status_code, unready.json()["reason"]) == (503, "the worker is starting")
        worker.reason = None
        assert (await client.get("/readyz")).status_code == 200
        response = await client.get("/metrics")
        assert worker.refreshed == 1
        families = {family.name for family in text_string_to_metric_families(response.text)}
        assert {"fusequeue_forward_rows", "fusequeue_batches", "fusequeue_spool_bytes"} <= families
        assert (await client.get("/")).status_code == 404
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


async def test_port_in_use_is_named() -> None:
    """Several workers of a machine need different ports."""
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"FUSEQUEUE_WORKER_PORT {port}"):
            async with http_port("127.0.0.1", port, WorkerStub()):
                pass


@pytest.mark.parametrize(
    ("rows", "label"), [(1, "1"), (2, "2"), (3, "3-4"), (8, "5-8"), (9, "9-16"), (32, "17-32"), (256, "33+")]
)
def test_rows_are_labelled_by_range(rows: int, label: str) -> None:
    """A model has at most seven series, whatever `max_batch` is."""
    assert metrics.rows_label(rows) == label
