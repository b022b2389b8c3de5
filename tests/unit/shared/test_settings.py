"""Settings and their table."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from shared.config import settings
from shared.config.setting_readers import READERS
from shared.errors import ConfigurationError
from shared.queue.policy_table import POLICIES

ROOT = Path(__file__).resolve().parents[3]


def test_documented_settings_table_is_current() -> None:
    """`docs/operations/settings.md` ends with what `python -m shared.config.settings` prints."""
    document = (ROOT / "docs/operations/settings.md").read_text("utf-8")
    assert document.rstrip().endswith(settings.table()), "run python -m shared.config.settings and paste its table"


# Readers of settings by the path of the code; `api/jobs` is code of the API and of the chores.
READERS_BY_PATH = {
    "api/chores/": "chores",
    "api/background.py": "chores",
    "api/protocols/openai/batches/": "chores",
    "api/jobs/": "shared",
    "api/": "api",
    "cli/": "cli",
    "worker/": "worker",
    "shared/": "shared",
}
HOLDERS = {"settings", "_settings", "config", "configured"}


def readers_in_code() -> dict[str, set[str]]:
    """Return the readers of each setting, by the folder of the code that reads it."""
    found: dict[str, set[str]] = {name: set() for name in settings.Settings.model_fields}
    for folder in ("api", "cli", "worker", "shared"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            reader = next(reader for start, reader in READERS_BY_PATH.items() if name.startswith(start))
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in found:
                    holder = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                    if holder in HOLDERS:
                        found[node.attr].add(reader)
    return found


def test_the_readers_of_each_setting_are_those_in_the_code() -> None:
    """Code in `shared` can be that of any of them; policies are read by the queue's scripts."""
    found = readers_in_code()
    assert READERS.keys() == found.keys(), "add the new setting to shared/config/setting_readers.py"
    for name, seen in found.items():
        declared = set(READERS[name].split(", "))
        assert seen - {"shared"} <= declared, name
        if name in POLICIES:
            assert declared == {"api", "worker", "chores"}, name
        elif "shared" not in seen:
            assert declared == seen, name


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
        ("PUBLIC_URL", "https://images.example.org\n"),
        ("PUBLIC_URL", "images.example.org"),
        ("PUBLIC_URL", "https://"),
        ("PUBLIC_URL", "https://bücher.example"),
        ("PUBLIC_URL", "https://images.example.org:port"),
        ("PUBLIC_URL", "https://images.example.org/?key=1"),
        ("PUBLIC_URL", "https://images..example.org"),
        ("PUBLIC_URL", "https://[fd00::1"),
        ("PUBLIC_URL", 'https://images.example.org/"'),
        ("PUBLIC_URL", "https://images.example.org\\x"),
        ("REDIS_URL", "redis://localhost\n"),
        ("REDIS_URL", "redis://bücher.example"),
        ("REDIS_URL", "redis://localhost/first"),
        ("REDIS_URL", "unix://"),
        ("RQ_REDIS_URL", "redis://local host"),
        ("CORS_ORIGINS", "https://shop.example/"),
        ("CORS_ORIGINS", "https://shop.example:99999"),
        ("CORS_ORIGINS", "https://Shop.example"),
        ("CORS_ORIGINS", "https://["),
        ("S3_BUCKET", "images\n"),
        ("S3_REGION", "eu-central-1\n"),
        ("S3_ACCESS_KEY_ID", "AKIA\n"),
        ("S3_SECRET_ACCESS_KEY", "secret\n"),
        ("WORKER_HOST", "0.0.0.0:8000"),
        ("WORKER_HOST", "[::1]"),
        ("WORKER_HOST", "256.0.0.1"),
        ("API_METRICS_HOST", "%"),
        ("S3_ENDPOINT_URL", "minio:9000"),
        ("S3_PUBLIC_ENDPOINT_URL", "s3://bucket"),
        ("WORKER_HOST", "http://0.0.0.0"),
        ("API_METRICS_HOST", "0.0.0.0 "),
        ("TRUSTED_PROXIES", "127.0.0.1,load-balancer"),
        ("TRUSTED_PROXIES", "10.0.0.0/33"),
    ],
)
def test_error_names_the_invalid_setting(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """The error names the variable, so that an operator knows what to change."""
    monkeypatch.setenv(f"FUSEQUEUE_{name}", value)
    with pytest.raises(ConfigurationError, match=f"FUSEQUEUE_{name}"):
        settings.load()


def test_error_does_not_repeat_an_invalid_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can hold a password, and errors are logged."""
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", "redis:/:hunter2@localhost")
    with pytest.raises(ConfigurationError) as caught:
        settings.load()
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REDIS_URL", "redis://:pässword@localhost/3?socket_timeout=5"),
        ("REDIS_URL", "rediss://user:p%2Fw@[fd00::1]:6380/"),
        ("REDIS_URL", "redis://"),
        ("REDIS_URL", "unix:///run/redis.sock?db=1"),
        ("WORKER_HOST", "fe80::1%eth0"),
        ("WORKER_HOST", "gpu_1.internal."),
        ("S3_BUCKET", "arn:aws:s3:eu-central-1:123456789012:accesspoint/images"),
    ],
)
def test_valid_addresses_and_names_are_kept(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"FUSEQUEUE_{name}", value)
    assert getattr(settings.load(), name.lower()) == value


def test_a_level_of_the_log_can_be_in_small_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEQUEUE_LOG_LEVEL", "warning")
    assert settings.load().log_level == "WARNING"


def test_origins_are_kept_as_browsers_send_them(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ("https://shop.example", "http://[fd00::1]:8000", "http://localhost:3000")
    monkeypatch.setenv("FUSEQUEUE_CORS_ORIGINS", ", ".join(listed))
    assert settings.load().cors_origins == listed


def test_lists_are_comma_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table shows them in this form."""
    monkeypatch.setenv("FUSEQUEUE_FETCH_PORTS", "443, 8443,9000")
    monkeypatch.setenv("FUSEQUEUE_FETCH_ALLOW_NETWORKS", "10.0.0.0/8,fd00::/8")
    loaded = settings.load()
    assert loaded.fetch_ports == (443, 8443, 9000)
    assert [str(network) for network in loaded.fetch_allow_networks] == ["10.0.0.0/8", "fd00::/8"]


@pytest.mark.parametrize(
    ("listed", "trusted"),
    [("127.0.0.1/8, fd00::1", "127.0.0.0/8,fd00::1"), ("10.0.0.7,", "10.0.0.7"), ("127.0.0.1,*", "*")],
)
def test_networks_of_proxies_can_have_host_bits(monkeypatch: pytest.MonkeyPatch, listed: str, trusted: str) -> None:
    """The server would compare such a network as text, and trust nobody."""
    monkeypatch.setenv("FUSEQUEUE_TRUSTED_PROXIES", listed)
    assert settings.load().trusted_proxies == trusted


@pytest.mark.parametrize("url", ["https://images.example.org", "http://[::1]:8000/base/", "http://10.0.0.1"])
def test_a_public_url_can_have_a_port_and_a_path(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("FUSEQUEUE_PUBLIC_URL", url)
    assert settings.load().public_url == url


def test_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose files and unit files set variables to the empty string."""
    monkeypatch.setenv("FUSEQUEUE_S3_BUCKET", "")
    monkeypatch.setenv("FUSEQUEUE_LEASE_MS", "")
    loaded = settings.load()
    assert loaded.s3_bucket is None
    assert loaded.lease_ms == 30_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FUSEQUEUE_LEASE_MS", None),
        ("FUSEQUEUE_URL", None),
        ("FUSEQUEUE_API_SERVICE_HOST", None),
        ("FUSEQUEUE_PORT_8000_TCP_ADDR", None),
        ("PATH", None),
        ("FUSEQUEUE_LEASE_SM", "unknown setting FUSEQUEUE_LEASE_SM (ignored); did you mean FUSEQUEUE_LEASE_MS?"),
        ("FUSEQUEUE_FOO", "unknown setting FUSEQUEUE_FOO (ignored)"),
    ],
)
def test_unknown_settings_are_reported(name: str, message: str | None) -> None:
    """Variables of clients and of Kubernetes are not settings."""
    assert settings.unknown_variables([name]) == ([] if message is None else [message])
