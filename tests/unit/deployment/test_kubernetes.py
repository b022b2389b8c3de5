"""The Kubernetes manifests of the base and of each component: valid, and consistent with the program."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from unit.deployment.kubernetes_manifests import (
    COMPONENTS,
    FOLDER,
    NEEDS_KUBECTL,
    Document,
    faults,
    named,
    pod_of,
    render,
)

from api.routes.operators.operations import ScaleObject
from cli.main import COMMANDS
from shared.config import models_file, settings
from shared.config.settings import Settings
from worker.handing_over import LAST_S
from worker.worker import RELEASE_S

pytestmark = NEEDS_KUBECTL

ROOT = FOLDER.parents[1]
ANSWERED = {"/healthz", "/readyz", "/metrics", "/minio/health/ready"}


def everything() -> list[Document]:
    return [*render(), *render(COMPONENTS, "fusequeue")]


def base(kind: str, name: str) -> Document:
    return named(render(), kind, name)


def pods() -> Iterator[tuple[Document, Document]]:
    """Yield each workload with its pod."""
    for document in everything():
        if document["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield document, pod_of(document)


def scaled_object() -> Document:
    return copy.deepcopy(named(render(("keda",), "fusequeue"), "ScaledObject", "fusequeue-worker"))


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
    broken = copy.deepcopy(base("Deployment", "fusequeue-worker"))
    broken["spec"]["template"]["spec"]["tolerations_"] = []
    assert faults(broken)


def test_keda_reads_the_scale_of_the_api() -> None:
    """The value is a field of its response; a key of scope `metrics` is enough."""
    metadata = scaled_object()["spec"]["triggers"][0]["metadata"]
    assert metadata["valueLocation"] in ScaleObject.model_fields
    assert "--scopes metrics" in (FOLDER / "components" / "keda" / "kustomization.yaml").read_text("utf-8")


def test_variables_are_settings() -> None:
    """A wrong name would be ignored silently."""
    used: set[str] = set()
    for path in FOLDER.rglob("*.yaml"):
        used |= set(re.findall(r"\bFUSEQUEUE_[A-Z0-9_]+", path.read_text("utf-8")))
    known = {f"{settings.PREFIX}{name.upper()}" for name in Settings.model_fields}
    assert used - known == set()
    assert {"FUSEQUEUE_WORKER_PORT", "FUSEQUEUE_DRAIN_TIMEOUT_S", "FUSEQUEUE_REDIS_URL"} <= used


def test_nothing_runs_as_root_or_writes_to_its_image() -> None:
    """Also in the components."""
    for workload, pod in pods():
        name = workload["metadata"]["name"]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["containers"]:
            secured = container["securityContext"]
            assert secured["readOnlyRootFilesystem"], name
            assert not secured["allowPrivilegeEscalation"], name
            assert secured["capabilities"] == {"drop": ["ALL"]}, name
            assert ":" in container["image"], f"{name}: no tag"


def test_commands_and_probes_exist() -> None:
    """With a wrong command or path a pod never becomes ready."""
    for workload, pod in pods():
        for container in pod["containers"]:
            command = container.get("command", [])
            assert command[:1] != ["fusequeue"] or command[1] in COMMANDS, workload["metadata"]["name"]
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in (value for key, value in container.items() if key.endswith("Probe") and "httpGet" in value):
                assert probe["httpGet"]["path"] in ANSWERED
                assert probe["httpGet"]["port"] in ports
    for document in render(("prometheus",)):
        for endpoint in document["spec"].get("podMetricsEndpoints", []) if document["kind"] == "PodMonitor" else []:
            assert endpoint["path"] == "/metrics"


def test_the_dashboard_is_a_config_map_for_a_sidecar_of_grafana() -> None:
    (found,) = [one for one in render(("grafana",)) if one["metadata"]["name"] == "fusequeue-dashboard"]
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["fusequeue.json"])["title"] == "fusequeue"


def test_a_drain_ends_within_the_grace_period() -> None:
    """The rest is for the checkpoints of jobs that are handed over, and for their release."""
    worker = next(pod for workload, pod in pods() if workload["metadata"]["name"] == "fusequeue-worker")
    text = (FOLDER / "base" / "kustomization.yaml").read_text("utf-8")
    drain_s = float(re.findall(r"FUSEQUEUE_DRAIN_TIMEOUT_S=(\d+)", text)[0])
    assert drain_s + LAST_S + RELEASE_S <= worker["terminationGracePeriodSeconds"]
    variables = {one["name"]: one for one in worker["containers"][0]["env"]}
    port = variables["FUSEQUEUE_WORKER_PORT"]["value"]
    assert [one["containerPort"] for one in worker["containers"][0]["ports"]] == [int(port)]


def test_the_models_file_is_valid() -> None:
    assert len(models_file.load(FOLDER / "base" / "models.toml")) == 1


def test_workers_get_a_gpu_a_cache_and_time_to_start() -> None:
    """One GPU each on tainted nodes, weights on a volume at the image's path, ready when warm."""
    workload = base("Deployment", "fusequeue-worker")
    pod = workload["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    claimed = next(one for one in pod["volumes"] if "persistentVolumeClaim" in one)
    claim = base("PersistentVolumeClaim", claimed["persistentVolumeClaim"]["claimName"])["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]
    assert claim["storageClassName"], "the default class of most clusters has no ReadWriteMany"
    cache = re.findall(r"HF_HOME=(\S+)", (ROOT / "compose" / "Dockerfile").read_text("utf-8"))
    assert [mount["mountPath"] for mount in worker["volumeMounts"] if mount["name"] == claimed["name"]] == cache
    startup = worker["startupProbe"]
    assert startup["httpGet"]["path"] == worker["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800, "a cold download takes its time"
    assert worker["livenessProbe"]["httpGet"]["path"] == "/healthz", "an outage of Redis is no reason to kill it"
    rolling = workload["spec"]["strategy"]["rollingUpdate"]
    assert rolling["maxUnavailable"] > 0, "else an upgrade waits for ever for a GPU that no old worker gives up"
    assert {"name": "FUSEQUEUE_DEVICE", "value": "cuda"} in worker["env"], "else it would work on the CPU without one"


def test_a_volume_changes_its_owner_once() -> None:
    """And not at each start of a pod, file by file."""
    grouped = [pod["securityContext"] for _, pod in pods() if "fsGroup" in pod["securityContext"]]
    assert len(grouped) > 2
    assert {one.get("fsGroupChangePolicy") for one in grouped} == {"OnRootMismatch"}


def test_a_drained_node_does_not_evict_all_pods_of_the_api() -> None:
    """The disruption budget selects the pods of its deployment; one that is not ready does not block the drain."""
    budget = base("PodDisruptionBudget", "fusequeue-api")["spec"]
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    selector = budget["selector"]["matchLabels"]
    template = base("Deployment", "fusequeue-api")["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= template.items()


def test_a_spot_node_that_ends_evicts_all_its_workers_at_once() -> None:
    """With a budget the second eviction waits until the replacement of the first is ready: after the node's end."""
    labels = base("Deployment", "fusequeue-worker")["spec"]["template"]["metadata"]["labels"]
    budgets = [one for one in render() if one["kind"] == "PodDisruptionBudget"]
    assert budgets
    assert not [one for one in budgets if one["spec"]["selector"]["matchLabels"].items() <= labels.items()]


def test_every_container_requests_cpu_and_memory_and_limits_memory() -> None:
    """A namespace with a quota refuses others, and a node can kill what uses more than it requests."""
    for workload, pod in pods():
        for container in pod["containers"]:
            resources = container.get("resources", {})
            assert resources.get("requests", {}).keys() >= {"cpu", "memory"}, workload["metadata"]["name"]
            assert "memory" in resources.get("limits", {}), workload["metadata"]["name"]


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
    pod = base("Deployment", "fusequeue-api")["spec"]["template"]["spec"]
    waits_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert 0 < waits_s < pod["terminationGracePeriodSeconds"] - 20


def test_only_the_api_accepts_connections_from_outside() -> None:
    """The port of the workers needs no key: pods of the cluster only. Every pod has a policy with its ports."""
    documents = render(COMPONENTS, "fusequeue")
    policies = [one["spec"] for one in documents if one["kind"] == "NetworkPolicy"]
    for workload, pod in pods():
        if workload["kind"] == "Job":
            continue  # it ends, and listens on no port
        labels = workload["spec"]["template"]["metadata"]["labels"]
        name = workload["metadata"]["name"]
        (policy,) = [one for one in policies if one["podSelector"]["matchLabels"].items() <= labels.items()]
        ports = {port["name"] for container in pod["containers"] for port in container.get("ports", ())}
        assert {port["port"] for rule in policy.get("ingress", ()) for port in rule["ports"]} == ports, name
        if name not in ("fusequeue-api", "fusequeue-minio"):
            assert all(rule["from"] for rule in policy.get("ingress", ())), name
