"""The compose file and the Dockerfile, checked without Docker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from shared.config import settings
from shared.config.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (FOLDER / "Dockerfile").read_text("utf-8")
ONCE = {"s3-bucket", "s3-owner"}  # they end
IMAGE_UIDS = {"prometheus": "65534", "grafana": "472"}  # users of the images


def stage(name: str) -> str:
    """Return the text of a Dockerfile stage and of its base stages."""
    match = re.search(rf"^FROM (\S+) AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    assert match is not None, name
    base, text = match.groups()
    copied = re.findall(r"COPY --from=(\S+)", text)
    return text + "".join(stage(other) for other in (base, *copied) if f" AS {other}\n" in DOCKERFILE)


def test_all_services_exist_with_a_cpu_profile() -> None:
    """Redis, S3, API, worker, chores, Prometheus and Grafana; one worker per profile."""
    assert {"redis", "s3", "s3-bucket", "api", "chores", "prometheus", "grafana"} <= SERVICES.keys()
    assert (SERVICES["worker"]["profiles"], SERVICES["worker-cpu"]["profiles"]) == (["gpu"], ["cpu"])
    assert "download.pytorch.org/whl/cpu" in SERVICES["worker-cpu"]["build"]["args"]["TORCH_INDEX"]


def test_variables_are_settings_and_secrets_have_no_defaults() -> None:
    """In the compose file and in the images; S3's secret and Grafana's password must be set."""
    known = {f"{settings.PREFIX}{name.upper()}" for name in Settings.model_fields}
    text = (FOLDER / "compose.yaml").read_text("utf-8") + DOCKERFILE
    assert set(re.findall(r"\bFUSEQUEUE_[A-Z0-9_]+", text)) <= known
    assert not re.findall(r"\$\{(S3_SECRET|GRAFANA_PASSWORD)(?!:\?)", text)


def test_redis_keeps_jobs() -> None:
    """The API refuses a Redis with eviction."""
    command = " ".join(SERVICES["redis"]["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command


def test_services_are_hardened_and_have_health_checks() -> None:
    """Read-only, without capabilities; the health check is in the compose file or the image."""
    for name, service in SERVICES.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        checked = "healthcheck" in service or "build" in service
        assert checked or name in ONCE, name
        assert "latest" not in service["image"], name
    for target in ("api", "worker"):
        assert "HEALTHCHECK" in stage(target)
        assert "/readyz" in stage(target)


def test_no_service_runs_as_root() -> None:
    """Except the one that changes the owner of a new volume and exits."""
    for name, service in SERVICES.items():
        user = str(service.get("user", "10001" if "build" in service else IMAGE_UIDS.get(name, "root")))
        if name != "s3-owner":
            assert user.partition(":")[0] not in ("root", "0"), name
            assert "cap_add" not in service, name
    owner, server = SERVICES["s3-owner"], SERVICES["s3"]
    assert (owner["network_mode"], owner["restart"]) == ("none", "no")
    assert set(owner["cap_add"]) == {"CHOWN", "DAC_READ_SEARCH"}
    assert owner["entrypoint"] == ["chown", "-R", server["user"], "/data"]
    assert owner["volumes"] == server["volumes"]
    assert server["depends_on"]["s3-owner"]["condition"] == "service_completed_successfully"
    assert server["environment"]["HOME"] in server["tmpfs"], "its image is read-only, and it wants to write there"


def test_references_between_services_exist() -> None:
    """Hosts, volumes and dependencies."""
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", {})) <= SERVICES.keys(), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (FOLDER / source).exists(), source
            elif not source.startswith("${"):
                assert source in COMPOSE["volumes"], source
    for waited in ("redis", "s3"):
        assert "healthcheck" in SERVICES[waited]
    scraped = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    hosts = {host for job in scraped for one in job["dns_sd_configs"] for host in one["names"]}
    assert hosts == {"api", "worker", "worker-cpu"}
    assert str(scraped[1]["dns_sd_configs"][0]["port"]) in re.findall(r"FUSEQUEUE_WORKER_PORT=(\d+)", DOCKERFILE)


def test_grafana_finds_the_dashboard_and_its_source() -> None:
    """By the folder and the uid in the dashboard."""
    providers = yaml.safe_load((FOLDER / "grafana/provisioning/dashboards/fusequeue.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert any(volume.split(":")[1] == providers[0]["options"]["path"] for volume in SERVICES["grafana"]["volumes"])
    used = re.findall(r'"uid": "([^"]+)"', (FOLDER / "grafana/dashboards/fusequeue.json").read_text("utf-8"))
    assert set(used) == {source["uid"], "fusequeue"}


def test_images_are_small_and_run_without_root() -> None:
    """The API image installs no extra, and so no torch. Neither image has a compiler or runs as root."""
    api, worker = stage("api"), stage("worker")
    assert re.findall(r"pip install .*", api) == ["pip install -c constraints.txt ."]
    assert any("'.[worker]'" in line for line in re.findall(r"pip install .*", worker))
    assert "USER 10001" in api
    assert "USER 10001" in worker
    copied = set(re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M))
    for source in {part for line in copied for part in line.split()}:
        assert (ROOT / source).exists(), source
        allowed = (ROOT / ".dockerignore").read_text().splitlines()
        assert f"!{source.split('/')[0]}" in allowed, f"{source} is ignored"


def test_the_grace_period_exceeds_the_drain() -> None:
    """Docker kills after the grace period."""
    grace_s = float(SERVICES["worker"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > Settings.model_fields["drain_timeout_s"].default
