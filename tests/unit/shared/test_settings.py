"""Settings and their table."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.config import settings
from shared.errors import ConfigurationError


def test_the_documented_table_is_that_of_the_code() -> None:
    """`docs/operations.md` ends with what `python -m shared.config.settings` prints."""
    document = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text("utf-8")
    assert document.rstrip().endswith(settings.table()), "run python -m shared.config.settings and paste its table"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LEASE_MS", "soon"),
        ("REDIS_URL", "localhost:6379"),
        ("REDIS_URL", "redis://localhost:port/0"),
        ("RQ_REDIS_URL", "http://localhost"),
        ("FETCH_PORTS", "443,https"),
        ("FETCH_PORTS", "70000"),
        ("FETCH_ALLOW_NETWORKS", "10.0.0.0/8,10.0.0.1/8"),
    ],
)
def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """The error names the variable, so that an operator knows what to change."""
    monkeypatch.setenv(f"FUSEQUEUE_{name}", value)
    with pytest.raises(ConfigurationError, match=f"FUSEQUEUE_{name}"):
        settings.load()


def test_a_wrong_url_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold a password, and errors end in logs."""
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", "redis:/:hunter2@localhost")
    with pytest.raises(ConfigurationError) as caught:
        settings.load()
    assert "hunter2" not in caught.value.message


def test_lists_are_written_with_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the table shows them."""
    monkeypatch.setenv("FUSEQUEUE_FETCH_PORTS", "443, 8443,9000")
    monkeypatch.setenv("FUSEQUEUE_FETCH_ALLOW_NETWORKS", "10.0.0.0/8,fd00::/8")
    loaded = settings.load()
    assert loaded.fetch_ports == (443, 8443, 9000)
    assert [str(network) for network in loaded.fetch_allow_networks] == ["10.0.0.0/8", "fd00::/8"]


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files and unit files set variables to nothing: that is no bucket called nothing."""
    monkeypatch.setenv("FUSEQUEUE_S3_BUCKET", "")
    monkeypatch.setenv("FUSEQUEUE_LEASE_MS", "")
    loaded = settings.load()
    assert loaded.s3_bucket is None
    assert loaded.lease_ms == 30_000


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("FUSEQUEUE_LEASE_MS", None),
        ("FUSEQUEUE_URL", None),
        ("FUSEQUEUE_API_SERVICE_HOST", None),
        ("FUSEQUEUE_PORT_8000_TCP_ADDR", None),
        ("PATH", None),
        ("FUSEQUEUE_LEASE_SM", "FUSEQUEUE_LEASE_SM is no setting and changes nothing; is it FUSEQUEUE_LEASE_MS?"),
        ("FUSEQUEUE_FOO", "FUSEQUEUE_FOO is no setting and changes nothing"),
    ],
)
def test_a_misspelt_setting_is_told(name: str, told: str | None) -> None:
    """What clients read, and what Kubernetes sets by itself, is none."""
    assert settings.misspelt([name]) == ([] if told is None else [told])
