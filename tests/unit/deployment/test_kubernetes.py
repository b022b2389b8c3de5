"""The Kubernetes manifests, rendered where there is a kubectl: valid, and in agreement with the program they run."""

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

from api.routes.queues import ScaleObject
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
    """Return an overlay's manifests as they would be applied; without a kubectl, the files that it names."""
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
    """Give each workload with the pod that it makes."""
    for document in everything():
        if document["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield document, document["spec"]["template"]["spec"]


def scaled_object() -> Document:
    return copy.deepcopy(next(one for one in rendered("overlays/keda") if one["kind"] == "ScaledObject"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_is_valid(overlay: str) -> None:
    """By the schemas of Kubernetes, unknown keys being errors, and by the keys that KEDA and the operator know."""
    assert {document["metadata"]["name"]: faults(document) for document in rendered(overlay) if faults(document)} == {}


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("triggers", 0, "metadata", "valueLocaton"), "wanted", "metadata has no valueLocaton"),
        (("triggers", 0, "metadata", "targetValue"), 1, "metadata.targetValue must be a string"),
        (("triggers", 0, "metricTyp"), "AverageValue", "trigger has no metricTyp"),
        (("cooldownPerod",), 300, "ScaledObject has no cooldownPerod"),
    ],
)
def test_a_typo_in_a_key_of_keda_is_noticed(path: tuple[str | int, ...], value: object, told: str) -> None:
    """KEDA itself would take some of them, and scale by something else."""
    broken = scaled_object()
    at: Any = broken["spec"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    assert faults(broken) == [told]


def test_a_typo_in_a_key_of_kubernetes_is_noticed() -> None:
    """The schemas are strict."""
    broken = copy.deepcopy(next(one for one in rendered("base") if one["kind"] == "Deployment"))
    broken["spec"]["template"]["spec"]["tolerations_"] = []
    assert faults(broken)


def test_keda_reads_what_the_api_tells() -> None:
    """The URL is that of the pool, the value is a field of its answer, the target is the deployment of the workers."""
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
    """A misspelt one would change nothing, silently."""
    named: set[str] = set()
    for path in FOLDER.rglob("*.yaml"):
        named |= set(re.findall(r"\bFUSEQUEUE_[A-Z0-9_]+", path.read_text("utf-8")))
    known = {f"{settings.PREFIX}{name.upper()}" for name in Settings.model_fields}
    assert named - known == set()
    assert {"FUSEQUEUE_WORKER_PORT", "FUSEQUEUE_POD_NAME", "FUSEQUEUE_REDIS_URL"} <= named


def test_nothing_runs_as_root_or_writes_to_its_image() -> None:
    """Of ours and of what the overlays bring along."""
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


def test_commands_and_probes_are_those_that_exist() -> None:
    """A renamed command or path would leave pods that never become ready."""
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
    """The rest of it is for what the drain gives back, and for the last upload."""
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


def test_the_models_file_is_one() -> None:
    """It is read as the program reads it."""
    assert len(models_file.load(FOLDER / "base" / "models.toml")) == 1


def named(kind: str, name: str, overlay: str = "base") -> Document:
    return next(one for one in rendered(overlay) if (one["kind"], one["metadata"]["name"]) == (kind, name))


def test_workers_get_a_gpu_a_cache_and_their_time() -> None:
    """A GPU each on tainted nodes, weights on a volume where the image keeps them, ready once warm."""
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
def test_a_drained_node_takes_not_all_at_once(name: str) -> None:
    """Each budget means the pods of the deployment of its name."""
    selector = named("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"]
    template = named("Deployment", name)["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= template.items()


def test_volumes_that_are_mounted_exist_and_what_must_write_can() -> None:
    """On a read-only image MinIO does not start unless its home is on a volume."""
    for workload, pod in pods():
        volumes = {one["name"] for one in pod.get("volumes", ())}
        volumes |= {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())}
        for container in pod["containers"]:
            mounted = {one["name"]: one["mountPath"] for one in container.get("volumeMounts", ())}
            assert mounted.keys() <= volumes, workload["metadata"]["name"]
            homes = [one["value"] for one in container.get("env", ()) if one["name"] == "HOME"]
            assert set(homes) <= set(mounted.values()), workload["metadata"]["name"]
            assert homes or not container["image"].startswith("minio/minio:")


def test_a_pod_has_time_for_what_it_does_last() -> None:
    """An API takes requests until the service knows that it leaves, and then ends them."""
    pod = named("Deployment", "fusequeue-api")["spec"]["template"]["spec"]
    waits_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert 0 < waits_s < pod["terminationGracePeriodSeconds"] - 20
