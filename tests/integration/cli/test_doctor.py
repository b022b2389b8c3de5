"""`fusequeue doctor` on deployments with one fault each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import ROOT
from harness.odd_s3 import KEEPS_FRAMES, odd_s3
from redis import Redis
from tiny.safetensors_file import demo_lora, file_of

from cli.doctor import deployment_findings
from cli.findings import Finding, Verdict
from shared.queue.redis_keys import RedisKeys

Findings = dict[str, Finding]
MODEL = '[[model]]\nid = "demo"\nsource = "{source}"\n'


@pytest.fixture
def deployment(durable_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Redis]:
    """Return the Redis of a deployment without faults; only API and workers are missing."""
    monkeypatch.setenv("FUSEQUEUE_REDIS_URL", durable_server.url)
    (tmp_path / "storage").mkdir(0o700)
    monkeypatch.setenv("FUSEQUEUE_STORAGE_DIR", str(tmp_path / "storage"))
    monkeypatch.setenv("FUSEQUEUE_MODELS", str(ROOT / "models.toml"))
    monkeypatch.setenv("FUSEQUEUE_URL", "http://127.0.0.1:9")
    with Redis.from_url(durable_server.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        yield client


@pytest.fixture
def examined() -> Callable[[], Findings]:
    """Run the checks and return the findings by name."""

    def run() -> Findings:
        findings = list(deployment_findings())
        assert all(bool(finding.remedy) is (finding.verdict != Verdict.OK) for finding in findings)
        return {finding.name: finding for finding in findings}

    return run


def test_deployment_without_faults_passes(deployment: Redis, examined: Callable[[], Findings]) -> None:
    """Only the missing API and workers are reported."""
    findings = examined()
    assert {name for name, finding in findings.items() if finding.verdict != Verdict.OK} == {"api", "workers"}
    assert {"models file", "model demo", "storage", "redis version", "redis eviction", "queue schema"} <= set(findings)


def _evicting(redis: Redis, _folder: Path, _env: pytest.MonkeyPatch) -> None:
    redis.config_set("maxmemory-policy", "allkeys-lru")


def _forgetful(redis: Redis, _folder: Path, _env: pytest.MonkeyPatch) -> None:
    redis.config_set("appendonly", "no")


def _full(redis: Redis, _folder: Path, _env: pytest.MonkeyPatch) -> None:
    redis.config_set("maxmemory", int(redis.info("memory")["used_memory"]))


def _newer(redis: Redis, _folder: Path, _env: pytest.MonkeyPatch) -> None:
    redis.set(RedisKeys("default").schema, 99)


def _two_retentions(redis: Redis, _folder: Path, _env: pytest.MonkeyPatch) -> None:
    keys, now_ms = RedisKeys("default"), int(1000 * redis.time()[0])
    for role, value in (("api", "9"), ("worker", "5")):
        source = {"role": role, "set": {"retention_s": value}, "defaults": {}}
        redis.hset(keys.policy_sources, json.dumps(source), f"{now_ms} {now_ms}")
    redis.hset(keys.policies, "retention_s", "9")


def _no_redis(_redis: Redis, _folder: Path, env: pytest.MonkeyPatch) -> None:
    env.setenv("FUSEQUEUE_REDIS_URL", "redis://127.0.0.1:9/0")


def _open_folder(_redis: Redis, folder: Path, _env: pytest.MonkeyPatch) -> None:
    (folder / "storage").chmod(0o755)


def _missing_folder(_redis: Redis, folder: Path, env: pytest.MonkeyPatch) -> None:
    env.setenv("FUSEQUEUE_STORAGE_DIR", str(folder / "mistyped" / "storage"))


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


def _no_weights_of_a_part(_redis: Redis, folder: Path, env: pytest.MonkeyPatch) -> None:
    """The text encoder's are there, and a tokenizer needs none."""
    parts = {"unet": "UNet2DConditionModel", "text_encoder": "CLIPTextModel", "tokenizer": "CLIPTokenizerFast"}
    for part in parts:
        (folder / "weights" / part).mkdir(parents=True)
        (folder / "weights" / part / "config.json").write_text("{}")
    (folder / "weights/text_encoder/model.safetensors").touch()
    index = {"_class_name": "A", **{name: ["diffusers", kind] for name, kind in parts.items()}}
    (folder / "weights/model_index.json").write_text(json.dumps(index))
    (folder / "models.toml").write_text(MODEL.format(source="weights"))
    env.setenv("FUSEQUEUE_MODELS", str(folder / "models.toml"))


def _with_file(key: str, contents: bytes) -> Callable[[Redis, Path, pytest.MonkeyPatch], None]:
    def change(_redis: Redis, folder: Path, env: pytest.MonkeyPatch) -> None:
        source = folder / "weights"
        source.mkdir()
        (source / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]}))
        (folder / "a.safetensors").write_bytes(contents)
        (source / "part.safetensors").touch()
        (folder / "models.toml").write_text(f'{MODEL.format(source="weights")}{key} = "a.safetensors"\n')
        env.setenv("FUSEQUEUE_MODELS", str(folder / "models.toml"))

    return change


def _without_a_part(index: str, entry: list[Any]) -> Callable[[Redis, Path, pytest.MonkeyPatch], None]:
    def change(_redis: Redis, folder: Path, env: pytest.MonkeyPatch) -> None:
        source = folder / "weights"
        (source / "unet").mkdir(parents=True)
        (source / "unet" / "part.safetensors").touch()
        parts = {"unet": entry, "vae": entry, "safety_checker": [None, None]}
        (source / index).write_text(json.dumps({"_class_name": "A", **parts}))
        (folder / "models.toml").write_text(MODEL.format(source="weights"))
        env.setenv("FUSEQUEUE_MODELS", str(folder / "models.toml"))

    return change


def _no_source(_redis: Redis, folder: Path, env: pytest.MonkeyPatch) -> None:
    (folder / "models.toml").write_text(MODEL.format(source="./none"))
    env.setenv("FUSEQUEUE_MODELS", str(folder / "models.toml"))


def _no_refiner(_redis: Redis, folder: Path, env: pytest.MonkeyPatch) -> None:
    text = MODEL.format(source=ROOT / "demo" / "model") + '[model.refiner]\nsource = "./none"\n'
    (folder / "models.toml").write_text(text)
    env.setenv("FUSEQUEUE_MODELS", str(folder / "models.toml"))


def _no_scorer(_redis: Redis, folder: Path, env: pytest.MonkeyPatch) -> None:
    (folder / "models.toml").write_text(MODEL.format(source=ROOT / "demo" / "model") + 'scorer = "./none"\n')
    env.setenv("FUSEQUEUE_MODELS", str(folder / "models.toml"))


def _unknown_setting(_redis: Redis, _folder: Path, env: pytest.MonkeyPatch) -> None:
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
        (
            _two_retentions,
            ("policies", "warning", "FUSEQUEUE_RETENTION_S: 9 (api) applies", "restart those that differ"),
        ),
        (_no_redis, ("redis", "failed", "127.0.0.1:9", "FUSEQUEUE_REDIS_URL")),
        (_open_folder, ("storage", "warning", "open to every user", "chmod o=")),
        (_missing_folder, ("storage", "warning", "storage does not exist", "FUSEQUEUE_STORAGE_DIR")),
        (_no_folder, ("storage", "failed", "file/storage", "FUSEQUEUE_STORAGE_DIR")),
        (
            _with_file("checkpoint", file_of({"double_blocks.0.weight": ([1], [0.0])})),
            (
                "checkpoint of demo",
                "failed",
                "it has no weights of a UNet2DConditionModel",
                "set source to such a model",
            ),
        ),
        (
            _with_file("checkpoint", demo_lora(0)),
            ("checkpoint of demo", "failed", "a.safetensors: it is a LoRA file", "make it a [[model.adapter]]"),
        ),
        (_with_file("vae", b"<html>"), ("vae of demo", "failed", "its header cannot be read", "download it again")),
        (_no_models, ("models file", "failed", "none.toml", "FUSEQUEUE_MODELS")),
        (_no_weights, ("model demo", "failed", "no safetensors", "safe_serialization")),
        (_no_weights_of_a_part, ("model demo", "failed", "weights has no safetensors in unet", "download it again")),
        (
            _without_a_part("model_index.json", ["diffusers", "A"]),
            ("model demo", "failed", "weights has no folder vae, which its index lists", "copy or download"),
        ),
        (
            _without_a_part("modular_model_index.json", [None, None, {"pretrained_model_name_or_path": "weights"}]),
            ("model demo", "failed", "weights has no folder vae, which its index lists", "copy or download"),
        ),
        (_no_source, ("model demo", "failed", "no such folder", "`source`")),
        (_no_scorer, ("scorer of demo", "failed", "./none: no such folder", "`source`")),
        (_no_refiner, ("refiner of demo", "failed", "./none: no such folder", "`source`")),
        (_unknown_setting, ("settings", "warning", "FUSEQUEUE_RETENTION_S", "correct its name")),
        (_no_number, ("settings", "failed", "FUSEQUEUE_LEASE_MS", "docs/operations/settings.md")),
    ],
)
def test_fault_is_reported_with_a_remedy(
    deployment: Redis,
    examined: Callable[[], Findings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    break_it: Any,
    expected: tuple[str, str, str, str],
) -> None:
    name, verdict, seen, remedy = expected
    break_it(deployment, tmp_path, monkeypatch)
    finding = examined()[name]
    assert finding.verdict == verdict
    assert seen.lower() in finding.seen.lower()
    assert remedy in finding.remedy
    assert not (tmp_path / "mistyped").exists(), "a check makes no folder"


def test_an_api_that_does_not_respond_is_reported_with_the_reason(
    deployment: Redis, examined: Callable[[], Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """httpx's timeouts have no text."""

    async def time_out(*_: object) -> None:
        raise httpx.ReadTimeout("")

    monkeypatch.setattr(httpx.AsyncClient, "get", time_out)
    assert examined()["api"].seen == "http://127.0.0.1:9: ReadTimeout"


def test_proxies_of_the_environment_do_not_stop_the_checks(
    deployment: Redis, examined: Callable[[], Findings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "ftp://proxy.example")
    assert examined()["api"].seen.startswith("http://127.0.0.1:9: HTTP_PROXY in the environment")
    monkeypatch.setenv("NO_PROXY", "fd00::/8,[::1],127.0.0.0/8")
    assert "connect" in examined()["api"].seen.lower()


def test_missing_bucket_is_reported(
    deployment: Redis, examined: Callable[[], Findings], s3_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("BUCKET", "none"), ("ENDPOINT_URL", s3_server), ("ACCESS_KEY_ID", "a")):
        monkeypatch.setenv(f"FUSEQUEUE_S3_{name}", value)
    monkeypatch.setenv("FUSEQUEUE_S3_SECRET_ACCESS_KEY", "b")
    finding = examined()["storage"]
    assert (finding.verdict, "none" in finding.seen) == (Verdict.FAILED, True)


def test_a_server_that_stores_other_bytes_is_reported(
    deployment: Redis, examined: Callable[[], Findings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with odd_s3(tmp_path, KEEPS_FRAMES) as server:
        monkeypatch.setenv("AWS_CA_BUNDLE", server.ca_file)
        s3 = {"BUCKET": "images", "ENDPOINT_URL": server.url, "ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test"}
        for name, value in (s3 | {"CHECKSUMS": "when_supported"}).items():
            monkeypatch.setenv(f"FUSEQUEUE_S3_{name}", value)
        damaged = examined()["storage"]
        assert damaged.verdict is Verdict.FAILED
        assert "stored other bytes than it was sent" in damaged.seen
        monkeypatch.delenv("FUSEQUEUE_S3_CHECKSUMS")
        assert examined()["storage"].verdict is Verdict.OK
        monkeypatch.delenv("FUSEQUEUE_S3_ACCESS_KEY_ID")
        assert "FUSEQUEUE_S3_ACCESS_KEY_ID" in examined()["storage"].seen


@pytest.mark.parametrize(
    ("device", "gpu_present", "verdict", "remedy"),
    [
        (None, False, "warning", "for real models use a GPU"),
        ("cpu", True, "warning", "torch build for CUDA"),
        ("cuda:97", False, "failed", "FUSEQUEUE_DEVICE"),
        ("gpu", False, "failed", "FUSEQUEUE_DEVICE"),
    ],
)
def test_device_verdict(device: str | None, gpu_present: bool, verdict: str, remedy: str) -> None:
    from worker.engine.device import DeviceFacts, check, judge

    cpu = DeviceFacts("cpu", "cpu")
    result = judge(cpu, gpu_present=gpu_present) if device in (None, "cpu") else check(device)
    assert result.verdict == verdict
    assert remedy in result.remedy


def test_gpu_memory_used_by_other_processes_is_reported() -> None:
    from worker.engine.device import DeviceFacts, judge

    result = judge(DeviceFacts("cuda", "Some GPU", free_bytes=2**30, total_bytes=2**33), gpu_present=True)
    assert (result.verdict, "nvidia-smi" in result.remedy) == ("warning", True)
