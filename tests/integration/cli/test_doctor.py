"""Set-ups that are broken in one place each: the doctor names the place and says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.http_server import ROOT
from redis import Redis

from shared import doctor
from shared.doctor import Verdict
from shared.queue.redis_keys import RedisKeys

Findings = dict[str, dict[str, str]]
MODEL = '[[model]]\nid = "demo"\nsource = "{source}"\n'


@pytest.fixture
def sound(durable_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Redis]:
    """A set-up with nothing wrong but that nobody works there; gives its Redis."""
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", durable_server.url)
    monkeypatch.setenv("FUSEQUEUE_STORAGE_DIR", str(tmp_path / "storage"))
    monkeypatch.setenv("FUSEQUEUE_MODELS", str(ROOT / "models.toml"))
    monkeypatch.setenv("FUSEQUEUE_URL", "http://127.0.0.1:9")
    with Redis.from_url(durable_server.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        yield client


@pytest.fixture
def examined(capsys: pytest.CaptureFixture[str]) -> Callable[[], Findings]:
    """Run the checks and return the findings by name."""

    def run() -> Findings:
        assert doctor.main() == 0
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert all(bool(one["remedy"]) is (one["verdict"] != Verdict.OK) for one in found)
        return {one["name"]: one for one in found}

    return run


def test_a_sound_set_up_is_told_so(sound: Redis, examined: Callable[[], Findings]) -> None:
    """All is seen and well, but for the API and the workers, which are not there."""
    found = examined()
    assert {name for name, one in found.items() if one["verdict"] != Verdict.OK} == {"api", "workers"}
    assert {"models file", "model demo", "storage", "redis version", "redis eviction", "queue schema"} <= set(found)


def _evicting(redis: Redis, _folder: Path, _env: pytest.MonkeyPatch) -> None:
    redis.config_set("maxmemory-policy", "allkeys-lru")


def _forgetful(redis: Redis, _folder: Path, _env: pytest.MonkeyPatch) -> None:
    redis.config_set("appendonly", "no")


def _full(redis: Redis, _folder: Path, _env: pytest.MonkeyPatch) -> None:
    redis.config_set("maxmemory", int(redis.info("memory")["used_memory"]))


def _newer(redis: Redis, _folder: Path, _env: pytest.MonkeyPatch) -> None:
    redis.set(RedisKeys("default").schema, 99)


def _no_redis(_redis: Redis, _folder: Path, env: pytest.MonkeyPatch) -> None:
    env.setenv("FUSEQUEUE_REDIS_URL", "redis://127.0.0.1:9/0")


def _no_folder(_redis: Redis, folder: Path, env: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    env.setenv("FUSEQUEUE_STORAGE_DIR", str(folder / "file" / "storage"))


def _no_models(_redis: Redis, _folder: Path, env: pytest.MonkeyPatch) -> None:
    env.setenv("FUSEQUEUE_MODELS", "none.toml")


def _no_weights(_redis: Redis, folder: Path, env: pytest.MonkeyPatch) -> None:
    (folder / "weights").mkdir()
    (folder / "weights" / "model_index.json").write_text("{}")
    (folder / "models.toml").write_text(MODEL.format(source="weights"))
    env.setenv("FUSEQUEUE_MODELS", str(folder / "models.toml"))


def _no_source(_redis: Redis, folder: Path, env: pytest.MonkeyPatch) -> None:
    (folder / "models.toml").write_text(MODEL.format(source="./none"))
    env.setenv("FUSEQUEUE_MODELS", str(folder / "models.toml"))


def _misspelt(_redis: Redis, _folder: Path, env: pytest.MonkeyPatch) -> None:
    env.setenv("FUSEQUEUE_RETENTION", "60")


def _no_number(_redis: Redis, _folder: Path, env: pytest.MonkeyPatch) -> None:
    env.setenv("FUSEQUEUE_LEASE_MS", "soon")


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (_evicting, ("redis eviction", "failed", "allkeys-lru", "maxmemory-policy noeviction")),
        (_forgetful, ("redis durability", "warning", "appendonly no", "appendonly yes")),
        (_full, ("redis memory", "warning", "MiB used of", "raise maxmemory")),
        (_newer, ("queue schema", "failed", "99", "upgrade this program")),
        (_no_redis, ("redis", "failed", "127.0.0.1:9", "FUSEQUEUE_REDIS_URL")),
        (_no_folder, ("storage", "failed", "file/storage", "FUSEQUEUE_STORAGE_DIR")),
        (_no_models, ("models file", "failed", "none.toml", "FUSEQUEUE_MODELS")),
        (_no_weights, ("model demo", "failed", "no safetensors", "safe_serialization")),
        (_no_source, ("model demo", "failed", "no such folder", "`source`")),
        (_misspelt, ("settings", "warning", "FUSEQUEUE_RETENTION_S", "mend its name")),
        (_no_number, ("settings", "failed", "FUSEQUEUE_LEASE_MS", "docs/operations.md")),
    ],
)
def test_what_is_broken_is_named(
    sound: Redis,
    examined: Callable[[], Findings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Any,
    expected: tuple[str, str, str, str],
) -> None:
    name, verdict, seen, remedy = expected
    break_it(sound, tmp_path, monkeypatch)
    finding = examined()[name]
    assert finding["verdict"] == verdict
    assert seen.lower() in finding["seen"].lower()
    assert remedy in finding["remedy"]


def test_a_missing_bucket_is_named(
    sound: Redis, examined: Callable[[], Findings], s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BUCKET", "none"), ("ENDPOINT_URL", s3_server), ("ACCESS_KEY_ID", "a")):
        monkeypatch.setenv(f"FUSEQUEUE_S3_{name}", value)
    monkeypatch.setenv("FUSEQUEUE_S3_SECRET_ACCESS_KEY", "b")
    finding = examined()["storage"]
    assert (finding["verdict"], "none" in finding["seen"]) == ("failed", True)


@pytest.mark.parametrize(
    ("asked", "gpu_present", "verdict", "told"),
    [
        (None, False, "warning", "for real models use a GPU"),
        ("cpu", True, "warning", "torch build for CUDA"),
        ("cuda:97", False, "failed", "FUSEQUEUE_DEVICE"),
        ("gpu", False, "failed", "FUSEQUEUE_DEVICE"),
    ],
)
def test_the_device_is_judged(asked: str | None, gpu_present: bool, verdict: str, told: str) -> None:
    from worker.device_check import device, judge
    from worker.engine.device import DeviceFacts

    found = judge(DeviceFacts("cpu", "cpu"), gpu_present=gpu_present) if asked in (None, "cpu") else device(asked)
    assert found.verdict == verdict
    assert told in found.remedy


def test_a_gpu_that_somebody_else_fills_is_told() -> None:
    from worker.device_check import judge
    from worker.engine.device import DeviceFacts

    found = judge(DeviceFacts("cuda", "Some GPU", free_bytes=2**30, total_bytes=2**33), gpu_present=True)
    assert (found.verdict, "nvidia-smi" in found.remedy) == (Verdict.WARNING, True)
