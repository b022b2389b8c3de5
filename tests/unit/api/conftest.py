"""Fixtures of the API's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from harness.http_server import serving

from shared.queue import Queue


@pytest.fixture
async def api(fake_queue: Queue, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an API without network; some files have one with other settings."""
    async with serving(fake_queue, tmp_path) as client:
        yield client
