"""Alerts: tested by promtool, over metrics that the API and the workers export, each with a section of the runbook."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.http_server import BODY, serving
from prometheus_client.parser import text_string_to_metric_families
from unit.deployment.test_dashboard import ROOT, faults

from shared.auth import TenantLimits
from shared.queue import Queue, UnavailableModel, WorkerInfo
from shared.queue.maintenance.pauses import Pause, PauseKind
from worker.metrics import collectors

PROMETHEUS = ROOT / "compose" / "prometheus"
RULES = PROMETHEUS / "rules.yml"
ALERTS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text("utf-8"))["groups"][0]["rules"]
NEEDS_PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is in the package prometheus")
UNAVAILABLE = {"demo": UnavailableModel("connection refused", permanent=False, retry_in_s=5.0)}


def promtool(*arguments: str, folder: Path) -> None:
    result = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


@NEEDS_PROMTOOL
def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", RULES.name, folder=PROMETHEUS)
    promtool("check", "config", "--syntax-only", "prometheus.yml", folder=PROMETHEUS)


@NEEDS_PROMTOOL
def test_alerts_fire_on_their_cause_only(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    shutil.copy(Path(__file__).parent / "alerts.yaml", tmp_path)
    promtool("test", "rules", "alerts.yaml", folder=tmp_path)


def test_every_alert_is_tested_to_fire_and_to_be_quiet() -> None:
    cases = yaml.safe_load((Path(__file__).parent / "alerts.yaml").read_text("utf-8"))["tests"]
    checks = [check for case in cases for check in case["alert_rule_test"]]
    for fires in (True, False):
        assert {one["alertname"] for one in checks if bool(one.get("exp_alerts")) == fires} == {
            alert["alert"] for alert in ALERTS
        }


def test_metrics_and_labels_of_the_alerts_exist() -> None:
    assert {alert["alert"]: faults(alert["expr"]) for alert in ALERTS if faults(alert["expr"])} == {}


async def test_the_api_and_the_workers_export_the_metrics_of_the_alerts(fake_queue: Queue, tmp_path: Path) -> None:
    """With each label value that a rule selects; the metrics of a worker are those of any process."""
    assert collectors.NVML_TIMEOUT_S, "its import declares the workers' series"
    async with serving(fake_queue, tmp_path) as api:
        await api.post("/v1/jobs", json=BODY)
        await fake_queue.workers.heartbeat(WorkerInfo("w1", ("demo",)))
        await fake_queue.workers.heartbeat(WorkerInfo("w2", ("demo",), unavailable=UNAVAILABLE))
        text = (await api.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    for alert in ALERTS:
        for name, selector in re.findall(r"\b(fusequeue_\w+)(\{[^}]*\})?", alert["expr"]):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', selector))
            found = [one for one in samples if one.name == name and labels.items() <= one.labels.items()]
            assert found, f"{alert['alert']}: /metrics has no {name}{selector}"
    exported = {(one.name, tuple(one.labels.values())): one.value for one in samples}
    assert exported["fusequeue_model_workers", ("demo", "ready")] == 1
    assert exported["fusequeue_model_workers", ("demo", "unavailable")] == 1
    assert exported["fusequeue_startable_slots", ("demo",)] == 1
    assert exported["fusequeue_target_wait_seconds", ()] == 30


@pytest.mark.parametrize(("kind", "name"), [("all", ""), ("model", "demo"), ("tenant", "default")])
async def test_paused_jobs_are_not_startable(fake_queue: Queue, tmp_path: Path, kind: str, name: str) -> None:
    async with serving(fake_queue, tmp_path, auth="insecure-no-keys") as api:
        await api.post("/v1/jobs", json=BODY)
        await fake_queue.pauses.set(Pause(PauseKind(kind), name, "a new driver", 0))
        lines = (await api.get("/metrics")).text.splitlines()
    assert 'fusequeue_queued_jobs{model="demo",priority="standard"} 1.0' in lines
    assert 'fusequeue_startable_slots{model="demo"} 0.0' in lines


def test_every_alert_links_to_its_section_of_the_runbook() -> None:
    headings = re.findall(
        r"^### (\w+)$", (ROOT / "docs/operations/troubleshooting.md").read_text("utf-8"), re.MULTILINE
    )
    assert {alert["annotations"]["runbook"] for alert in ALERTS} == {
        f"docs/operations/troubleshooting.md#{alert['alert'].lower()}" for alert in ALERTS
    }
    assert [name for name in headings if name.startswith("Fusequeue")] == [alert["alert"] for alert in ALERTS]


def test_the_operator_gets_the_same_alerts() -> None:
    """Kustomize cannot put a file into another resource."""
    manifest = yaml.safe_load((ROOT / "compose/kubernetes/components/prometheus/rules.yaml").read_text("utf-8"))
    assert manifest["spec"] == yaml.safe_load(RULES.read_text("utf-8"))


def test_prometheus_of_the_compose_file_reads_the_rules() -> None:
    assert yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text("utf-8"))["rule_files"] == [RULES.name]


async def test_bulk_jobs_and_jobs_at_a_limit_are_no_long_waits(fake_queue: Queue, tmp_path: Path) -> None:
    """They have a day, or wait for their own tenant."""
    async with serving(fake_queue, tmp_path, auth="insecure-no-keys") as api:
        await fake_queue.api_keys.set_limits("default", TenantLimits(running_slots=1))
        for priority in ("standard", "standard", "bulk"):
            await api.post("/v1/jobs", json={**BODY, "priority": priority})
        assert len(await fake_queue.claims.claim("w1", ["demo"], 8)) == 1
        await asyncio.sleep(0.05)
        waits = {
            sample.name: sample.value
            for family in text_string_to_metric_families((await api.get("/metrics")).text)
            for sample in family.samples
            if sample.name in ("fusequeue_oldest_wait_seconds", "fusequeue_oldest_queued_seconds")
        }
    assert waits["fusequeue_oldest_wait_seconds"] == 0
    assert waits["fusequeue_oldest_queued_seconds"] > 0
