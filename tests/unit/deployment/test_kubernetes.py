"""The Kubernetes manifests, rendered if kubectl is installed: valid, and consistent with the program."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.kubernetes_schemas import faults

from api.routes.operations import ScaleObject
from cli.main import app
from shared.config import models_file, settings
from shared.config.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "compose" / "kubernetes"
OVERLAYS = ("base", "overlays/keda", "overlays/prometheus", "overlays/minio")
OURS = ("fusequeue-api", "fusequeue-worker")
ANSWERED = {"/healthz", "/readyz", "/metrics", "/minio/health/ready"}

Document = dict[str, Any]


@cache
def rendered(overlay: str) -> list[Document]:
    """Return an overlay's manifests as they would be applied; without kubectl, the files that it lists."""
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(FOLDER / overlay)]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        return [document for document in yaml.safe_load_all(text) if document]
    kustomization = yaml.safe_load((FOLDER / overlay / "kustomization.yaml").read_text("utf-8"))
    documents: list[Document] = []
    for name in kustomization["resources"]:
        path = FOLDER / overlay / name
        if path.is_dir():
            documents += rendered(str(path.resolve().relative_to(FOLDER)))
        else:
            documents += [document for document in yaml.safe_load_all(path.read_text("utf-8")) if document]
    return documents


def everything() -> list[Document]:
    return [document for overlay in OVERLAYS for document in rendered(overlay)]


def pods() -> Iterator[tuple[Document, Document]]:
    """Yield each workload with its pod."""
    for document in everything():
        if document["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield document, document["spec"]["template"]["spec"]


def scaled_object() -> Document:
    return copy.deepcopy(next(one for one in rendered("overlays/keda") if one["kind"] == "ScaledObject"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_is_valid(overlay: str) -> None:
    """According to the schemas of Kubernetes, without unknown keys, and to the keys of KEDA and the operator."""
    assert {document["metadata"]["name"]: faults(document) for document in rendered(overlay) if faults(document)} == {}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("triggers", 0, "metadata", "valueLocaton"), "wanted", "metadata has no valueLocaton"),
        (("triggers", 0, "metadata", "targetValue"), 1, "metadata.targetValue must be a string"),
        (("triggers", 0, "metricTyp"), "AverageValue", "trigger has no metricTyp"),
        (("cooldownPerod",), 300, "ScaledObject has no cooldownPerod"),
    ],
)
def test_a_typo_in_a_keda_key_is_an_error(path: tuple[str | int, ...], value: object, message: str) -> None:
    """KEDA accepts some of them and would scale on something else."""
    broken = scaled_object()
    at: Any = broken["spec"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    assert faults(broken) == [message]


def test_a_typo_in_a_kubernetes_key_is_an_error() -> None:
    """The schemas are strict."""
    broken = copy.deepcopy(next(one for one in rendered("base") if one["kind"] == "Deployment"))
    broken["spec"]["template"]["spec"]["tolerations_"] = []
    assert faults(broken)


def test_keda_reads_the_scale_of_the_api() -> None:
    """The URL is that of the pool, the value a field of its response, the target the deployment of the workers."""
    spec = scaled_object()["spec"]
    metadata = spec["triggers"][0]["metadata"]
    literals = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())["configMapGenerator"][0]["literals"]
    pool = next(one.partition("=")[2] for one in literals if one.startswith("FUSEQUEUE_NAMESPACE="))
    services = {one["metadata"]["name"] for one in rendered("overlays/keda") if one["kind"] == "Service"}
    assert metadata["url"] == f"http://fusequeue-api/v1/scale/{pool}"
    assert "fusequeue-api" in services
    assert metadata["valueLocation"] in ScaleObject.model_fields
    deployments = {one["metadata"]["name"]: one for one in rendered("overlays/keda") if one["kind"] == "Deployment"}
    workers = deployments[spec["scaleTargetRef"]["name"]]
    if shutil.which("kubectl"):
        assert "replicas" not in workers["spec"], "else each apply would undo what KEDA has scaled"


def test_variables_are_settings() -> None:
    """A wrong name would be ignored silently."""
    named: set[str] = set()
    for path in FOLDER.rglob("*.yaml"):
        named |= set(re.findall(r"\bFUSEQUEUE_[A-Z0-9_]+", path.read_text("utf-8")))
    known = {f"{settings.PREFIX}{name.upper()}" for name in Settings.model_fields}
    assert named - known == set()
    assert {"FUSEQUEUE_WORKER_PORT", "FUSEQUEUE_POD_NAME", "FUSEQUEUE_REDIS_URL"} <= named


def test_nothing_runs_as_root_or_writes_to_its_image() -> None:
    """Also in the overlays."""
    for workload, pod in pods():
        name = workload["metadata"]["name"]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0, name
        for container in pod["containers"]:
            secured = container["securityContext"]
            assert secured["readOnlyRootFilesystem"], name
            assert not secured["allowPrivilegeEscalation"], name
            assert secured["capabilities"] == {"drop": ["ALL"]}, name
            assert ":" in container["image"] or not shutil.which("kubectl"), f"{name}: no tag"


def test_commands_and_probes_exist() -> None:
    """With a wrong command or path a pod never becomes ready."""
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    for workload, pod in pods():
        for container in pod["containers"]:
            command = container.get("command", [])
            assert command[:1] != ["fusequeue"] or command[1] in commands, workload["metadata"]["name"]
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in (value for key, value in container.items() if key.endswith("Probe") and "httpGet" in value):
                assert probe["httpGet"]["path"] in ANSWERED
                assert probe["httpGet"]["port"] in ports
    for document in rendered("overlays/prometheus"):
        for endpoint in document["spec"].get("podMetricsEndpoints", []) if document["kind"] == "PodMonitor" else []:
            assert endpoint["path"] == "/metrics"


def test_a_drain_ends_within_the_grace_period() -> None:
    """The rest is for releasing jobs and the last upload."""
    worker = next(pod for workload, pod in pods() if workload["metadata"]["name"] == "fusequeue-worker")
    text = (FOLDER / "base" / "kustomization.yaml").read_text("utf-8")
    drain_s = float(re.findall(r"FUSEQUEUE_DRAIN_TIMEOUT_S=(\d+)", text)[0])
    assert drain_s + 5 <= worker["terminationGracePeriodSeconds"]
    variables = {one["name"]: one for one in worker["containers"][0]["env"]}
    port = variables["FUSEQUEUE_WORKER_PORT"]["value"]
    assert [one["containerPort"] for one in worker["containers"][0]["ports"]] == [int(port)]
    assert worker["serviceAccountName"] == "fusequeue-worker", "which may patch pods, and nothing else"
    role = next(one for one in rendered("base") if one["kind"] == "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]


def test_the_models_file_is_valid() -> None:
    assert len(models_file.load(FOLDER / "base" / "models.toml")) == 1


def named(kind: str, name: str, overlay: str = "base") -> Document:
    return next(one for one in rendered(overlay) if (one["kind"], one["metadata"]["name"]) == (kind, name))


def test_workers_get_a_gpu_a_cache_and_time_to_start() -> None:
    """One GPU each on tainted nodes, weights on a volume at the image's path, ready when warm."""
    workload = named("Deployment", "fusequeue-worker")
    pod = workload["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    claimed = next(one for one in pod["volumes"] if "persistentVolumeClaim" in one)
    assert named("PersistentVolumeClaim", claimed["persistentVolumeClaim"]["claimName"])
    cache = re.findall(r"HF_HOME=(\S+)", (ROOT / "compose" / "Dockerfile").read_text("utf-8"))
    assert [mount["mountPath"] for mount in worker["volumeMounts"] if mount["name"] == claimed["name"]] == cache
    startup = worker["startupProbe"]
    assert startup["httpGet"]["path"] == worker["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800, "a cold download takes its time"
    assert worker["livenessProbe"]["httpGet"]["path"] == "/healthz", "an outage of Redis is no reason to kill it"
    rolling = workload["spec"]["strategy"]["rollingUpdate"]
    assert rolling["maxUnavailable"] > 0, "else an upgrade waits for ever for a GPU that no old worker gives up"
    variables = {one["name"]: one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") for one in worker["env"]}
    assert variables["FUSEQUEUE_POD_NAME"] == "metadata.name", "whose deletion cost it keeps"
    assert variables["FUSEQUEUE_POD_NAMESPACE"] == "metadata.namespace"


@pytest.mark.parametrize("name", ["fusequeue-api", "fusequeue-worker"])
def test_a_drained_node_does_not_evict_all_pods(name: str) -> None:
    """Each disruption budget selects the pods of its deployment."""
    selector = named("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"]
    template = named("Deployment", name)["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= template.items()


def test_mounted_volumes_exist_and_minio_can_write() -> None:
    """On a read-only image MinIO only starts if its home is on a volume."""
    for workload, pod in pods():
        volumes = {one["name"] for one in pod.get("volumes", ())}
        volumes |= {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())}
        for container in pod["containers"]:
            mounted = {one["name"]: one["mountPath"] for one in container.get("volumeMounts", ())}
            assert mounted.keys() <= volumes, workload["metadata"]["name"]
            homes = [one["value"] for one in container.get("env", ()) if one["name"] == "HOME"]
            assert set(homes) <= set(mounted.values()), workload["metadata"]["name"]
            assert homes or not container["image"].startswith("minio/minio:")


def test_the_grace_period_covers_the_shutdown_of_the_api() -> None:
    """An API accepts requests until the service removes it, and then finishes them."""
    pod = named("Deployment", "fusequeue-api")["spec"]["template"]["spec"]
    waits_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert 0 < waits_s < pod["terminationGracePeriodSeconds"] - 20
