"""Fixtures of the tests of the library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(scope="module", autouse=True)
def _own_logs() -> Iterator[None]:
    """Undo what an engine sets for the logs of its process, which later tests read."""
    yield
    structlog.reset_defaults()
