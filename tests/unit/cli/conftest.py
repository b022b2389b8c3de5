"""Backfills against a service of the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.backfill import FakeService

from cli.backfill.ledger import Ledger


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path)
    yield ledger
    ledger.close()


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.backfill.pipeline.MIN_PAUSE_S", 0.0)
    monkeypatch.setattr("cli.backfill.pipeline.MAX_PAUSE_S", 0.0)
