"""Settings and their table."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import settings
from shared.errors import ConfigurationError


def test_the_documented_table_is_that_of_the_code() -> None:
    """`docs/operations.md` ends with what `python -m shared.settings` prints."""
    document = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text("utf-8")
    assert document.rstrip().endswith(settings.table()), "run python -m shared.settings and paste its table"


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable, so that an operator knows what to change."""
    monkeypatch.setenv("FUSEQUEUE_LEASE_MS", "soon")
    with pytest.raises(ConfigurationError, match="FUSEQUEUE_LEASE_MS"):
        settings.load()
