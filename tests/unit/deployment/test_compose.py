"""The compose file and the Dockerfile, checked without Docker."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from cli.main import app
from shared.config import settings
from shared.config.settings import Settings
from worker.handing_over import LAST_S
from worker.worker import RELEASE_S

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
    assert SERVICES["worker-cpu"]["environment"]["FUSEQUEUE_DEVICE"] == "cpu"
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
    uid = server["user"].partition(":")[0]
    assert owner["entrypoint"][-1] == f'test "$$(stat -c %u /data)" = {uid} || chown -R {server["user"]} /data'
    assert owner["volumes"] == server["volumes"]
    assert server["depends_on"]["s3-owner"]["condition"] == "service_completed_successfully"
    assert server["environment"]["HOME"] in server["tmpfs"], "its image is read-only, and it wants to write there"


def test_references_between_services_exist() -> None:
    """Hosts, volumes and dependencies."""
    for name, service in SERVICES.items():
        assert set(service.get("depends_on", {})) <= SERVICES.keys(), name
        for volume in service.get("volumes", ()):
            source = volume["source"] if isinstance(volume, dict) else volume.partition(":")[0]
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


def test_a_key_file_that_is_missing_is_not_made_as_a_folder() -> None:
    (volume,) = [volume for volume in SERVICES["prometheus"]["volumes"] if isinstance(volume, dict)]
    assert volume["target"] == "/run/metrics.key"
    assert volume["bind"]["create_host_path"] is False


def test_every_process_of_ours_reads_the_models_file_of_the_operator() -> None:
    """By default that of the repository; one that is missing is not made as a folder."""
    (path,) = re.findall(r"FUSEQUEUE_MODELS=(\S+)", DOCKERFILE)
    for name, service in SERVICES.items():
        mounts = [one for one in service.get("volumes", ()) if isinstance(one, dict) and one["target"] == path]
        assert len(mounts) == ("build" in service), name
        for mount in mounts:
            assert (mount["read_only"], mount["bind"]["create_host_path"]) == (True, False), name
            (default,) = re.fullmatch(r"\$\{MODELS_FILE:-(.+)\}", mount["source"]).groups()  # type: ignore[union-attr]
            assert (FOLDER / default).resolve() == ROOT / "models.toml"


def test_grafana_finds_the_dashboard_and_its_source() -> None:
    """By its folder; the source is the default of the dashboard's variable."""
    providers = yaml.safe_load((FOLDER / "grafana/provisioning/dashboards/fusequeue.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert any(volume.split(":")[1] == providers[0]["options"]["path"] for volume in SERVICES["grafana"]["volumes"])
    used = re.findall(r'"uid": "([^"]+)"', (FOLDER / "grafana/dashboards/fusequeue.json").read_text("utf-8"))
    assert set(used) == {"${datasource}", "fusequeue"}
    assert source["isDefault"]
    assert source["type"] == "prometheus"


def test_gpu_workers_get_one_gpu_each_and_do_not_start_without() -> None:
    """`count: 1` with --scale gave all the first GPU; a fixed name refuses --scale. Prometheus finds them all."""
    workers = {name: one for name, one in SERVICES.items() if "deploy" in one}
    devices = []
    for name, service in workers.items():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        devices += device["device_ids"]
        assert "count" not in device, name
        assert service["environment"]["FUSEQUEUE_DEVICE"] == "cuda", name
        assert name == "worker" or service["networks"]["default"]["aliases"] == ["worker"], name
    assert devices == [str(index) for index in range(len(workers))]
    assert len({service["container_name"] for service in workers.values()}) == len(workers) > 1


def test_prometheus_gets_a_bare_token_of_scope_metrics() -> None:
    """A JSON object would be sent as the token."""
    (command,) = re.findall(r"keys create (.*) > compose/metrics.key", (FOLDER / "compose.yaml").read_text("utf-8"))
    made = CliRunner().invoke(app, ["keys", "create", *command.split(), "--help"])
    assert made.exit_code == 0, made.output
    assert command == "--scopes metrics --quiet"


def test_images_run_without_root_and_the_api_has_no_torch() -> None:
    """The API's image installs no extra but `traces`, and its user owns nothing of it."""
    api, worker = stage("api"), stage("worker")
    assert "torch" not in api
    extras = re.compile(r"requirements\.py (.*) > ")
    assert extras.findall(api) == ["traces"]
    assert extras.findall(worker) == ["worker ${TORCHVISION:+vision} traces"]
    for text in (api, worker):
        last_install = text.rindex("pip install")
        assert "USER 10001" in text[last_install:]


def test_an_edit_of_the_sources_rebuilds_only_the_last_layers() -> None:
    """Torch and the dependencies are installed before, each in a layer of its own, from files that change seldom."""
    for target in ("api", "worker"):
        steps = re.findall(
            r"^(?:RUN|COPY) (?:.*\\\n)*.*", DOCKERFILE.split(f" AS {target}\n")[1].split("\nFROM ")[0], re.M
        )
        sources = [step for step in steps if "--mount=type=bind,target=/src" in step]
        assert len(sources) == 1
        assert "--no-deps /src/fusequeue /src" in sources[0], "dependencies are installed before"
        assert steps[-1] == sources[0]
        for step in steps[:-1]:
            assert set(re.findall(r"source=([\w./]+)", step)) <= {
                *("pyproject.toml", "fusequeue/pyproject.toml", "constraints.txt", "compose/requirements.py"),
            }, step
    torch_steps = [step for step in steps if "torch==" in step]
    assert ["--no-deps" in step for step in torch_steps] == [True, False], "its wheel, then its CUDA libraries"
    assert steps[:2] == torch_steps
    versions = re.findall(r"^ARG (TORCH|TORCHVISION)=(\S+)$", DOCKERFILE, re.M)
    assert dict(versions).keys() == {"TORCH", "TORCHVISION"}, (
        "of the same index: builds for another torch fail at import"
    )
    constraints = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert {f"{name.lower()}=={version}" for name, version in versions} <= {*constraints}


def test_files_of_the_images_are_in_the_build_context() -> None:
    """And every package of the wheel, with the files that its build reads."""
    copied = set(re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], "fusequeue", "pyproject.toml", "constraints.txt"}
    for source in needed | {part for line in copied for part in line.split()}:
        assert (ROOT / source).exists(), source
        allowed = (ROOT / ".dockerignore").read_text().splitlines()
        assert f"!{source.split('/')[0]}" in allowed, f"{source} is ignored"


def test_the_grace_period_exceeds_the_drain() -> None:
    """Docker kills after the grace period; the rest is for the last checkpoints and for the release of jobs."""
    grace_s = float(SERVICES["worker"]["stop_grace_period"].removesuffix("s"))
    assert grace_s >= Settings.model_fields["drain_timeout_s"].default + LAST_S + RELEASE_S
