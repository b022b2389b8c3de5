"""What steps of batches need."""

from __future__ import annotations

from collections.abc import AsyncIterator
from ipaddress import ip_network
from pathlib import Path

import pytest
from harness.http_server import ROOT

from api.protocols.openai.batches.batch_files import BatchContext
from shared.config import models_file
from shared.queue import Queue
from shared.runtime.clock import SyncedClock, now_ms
from shared.storage import connect

LOOPBACK = (ip_network("127.0.0.0/8"),)


@pytest.fixture
async def context(queue: Queue, tmp_path: Path) -> AsyncIterator[BatchContext]:
    allowed = {"fetch_allow_networks": LOOPBACK, "fetch_allow_http": True, "fetch_ports": tuple(range(1, 65_536))}
    values = {"models": ROOT / "models.toml", "storage_dir": tmp_path / "storage", **allowed}
    settings = queue.client.settings.model_copy(update=values)
    storage = connect(settings)
    yield BatchContext(settings, models_file.load(settings.models), queue, storage, SyncedClock(now_ms()))
    await storage.close()
