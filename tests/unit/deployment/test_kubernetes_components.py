"""Components of the Kubernetes manifests: alone, any two and all, with a namespace and a prefix, are valid."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from unit.deployment.kubernetes_manifests import (
    ADDRESSES,
    COMPONENTS,
    FOLDER,
    NEEDS_KUBECTL,
    Document,
    faults,
    named,
    pod_of,
    render,
    render_folder,
)

pytestmark = NEEDS_KUBECTL

NAMESPACE, PREFIX = "gpus", "prod-"
SECRETS = {"fusequeue", "fusequeue-scale", "fusequeue-metrics"}  # which users create
# Where a manifest names another one: key that holds the name, and the kind that it names.
REFERENCES = {
    "configMapRef": "ConfigMap",
    "configMapKeyRef": "ConfigMap",
    "configMap": "ConfigMap",
    "authenticationRef": "TriggerAuthentication",
}


PAIRS = [
    pytest.param(pair, marks=pytest.mark.slow, id="+".join(pair)) for pair in itertools.combinations(COMPONENTS, 2)
]
COMBINATIONS = [pytest.param((), id="none"), *PAIRS, pytest.param(COMPONENTS, id="all")]


@cache
def faults_of(document: str) -> list[str]:
    """Return the errors of a manifest; most are the same in many combinations."""
    return faults(json.loads(document))


def dangling(documents: tuple[Document, ...]) -> list[str]:
    """Return the references to manifests that do not exist."""
    existing = {(one["kind"], one["metadata"]["name"]) for one in documents}
    wanted: list[tuple[str, str]] = []

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for one in value:
                walk(one)
        elif isinstance(value, dict):
            wanted.extend((REFERENCES[key], one["name"]) for key, one in value.items() if key in REFERENCES)
            wanted.extend(("PersistentVolumeClaim", value[key]) for key in ("claimName",) if key in value)
            wanted.extend(("Service", value[key]) for key in ("serviceName",) if key in value)
            if target := value.get("scaleTargetRef"):
                wanted.append((target.get("kind", "Deployment"), target["name"]))
            for one in value.values():
                walk(one)

    for document in documents:
        walk(document)
    return [f"{kind} {name}" for kind, name in wanted if (kind, name) not in existing]


@pytest.mark.parametrize("components", COMBINATIONS)
def test_components_are_valid_together_with_a_namespace_and_a_prefix(components: tuple[str, ...]) -> None:
    """None, any two and all: names, references and namespaces follow, whatever the order of the components."""
    documents = render(components, NAMESPACE, PREFIX)
    errors = {one["metadata"]["name"]: faults_of(json.dumps(one, sort_keys=True)) for one in documents}
    assert {name: found for name, found in errors.items() if found} == {}
    assert [one["metadata"] for one in documents if one["metadata"].get("namespace") != NAMESPACE] == []
    assert [name for name in errors if not name.startswith(PREFIX)] == []
    assert dangling(documents) == []


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_is_valid_in_any_order_and_without_a_prefix(component: str) -> None:
    others = tuple(name for name in reversed(COMPONENTS) if name != component)
    for documents in (render((component,), "fusequeue"), render((*others, component), "fusequeue")):
        assert [found for one in documents if (found := faults_of(json.dumps(one, sort_keys=True)))] == []
        assert dangling(documents) == []


def test_a_missing_reference_is_an_error() -> None:
    """Of the check above."""
    documents = render(COMPONENTS, NAMESPACE, PREFIX)
    for kind in ("Deployment", "TriggerAuthentication", "ConfigMap", "Service"):
        assert dangling(tuple(one for one in documents if one["kind"] != kind)) != [], kind


@pytest.mark.parametrize(("namespace", "prefix"), [("fusequeue", ""), (NAMESPACE, PREFIX)])
def test_keda_reaches_the_api_from_its_own_namespace(namespace: str, prefix: str) -> None:
    """The URL has the name and namespace of the service, and the pool of the settings."""
    documents = render(("keda",), namespace, prefix)
    spec = named(documents, "ScaledObject", f"{prefix}fusequeue-worker")["spec"]
    named(documents, "Service", f"{prefix}fusequeue-api")
    url = spec["triggers"][0]["metadata"]["url"]
    assert url == f"http://{prefix}fusequeue-api.{namespace}.svc/v1/scale/default"
    assert spec["scaleTargetRef"] == {"name": f"{prefix}fusequeue-worker"}
    assert spec["triggers"][0]["authenticationRef"] == {"name": f"{prefix}fusequeue-scale"}
    workers = named(documents, "Deployment", f"{prefix}fusequeue-worker")
    assert "replicas" not in workers["spec"], "else each apply would undo what KEDA has scaled"


def test_keda_without_a_namespace_is_an_error() -> None:
    """And no URL that reaches nothing."""
    with pytest.raises(AssertionError, match=r"metadata\.namespace` is missing"):
        render(("keda",))


def test_the_pool_and_generated_secrets_follow_a_users_kustomization(tmp_path: Path) -> None:
    """A pool other than the default, and secrets with names that kustomize makes."""
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder)
    path = folder / "example" / "kustomization.yaml"
    kustomization = yaml.safe_load(path.read_text("utf-8"))
    kustomization |= {"namespace": NAMESPACE, "namePrefix": PREFIX}
    kustomization["configMapGenerator"][0]["literals"].append("FUSEQUEUE_NAMESPACE=video")
    kustomization["secretGenerator"] = [{"name": name, "literals": ["token=x"]} for name in sorted(SECRETS)]
    path.write_text(yaml.safe_dump(kustomization), "utf-8")
    documents = render_folder(path.parent)
    scaled = named(documents, "ScaledObject", "prod-fusequeue-worker")["spec"]
    assert scaled["triggers"][0]["metadata"]["url"] == "http://prod-fusequeue-api.gpus.svc/v1/scale/video"
    names = {one["metadata"]["name"] for one in documents if one["kind"] == "Secret"}
    authentication = named(documents, "TriggerAuthentication", "prod-fusequeue-scale")
    assert authentication["spec"]["secretTargetRef"][0]["name"] in names
    monitor = named(documents, "PodMonitor", "prod-fusequeue-api")
    assert monitor["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"]["name"] in names
    api = pod_of(named(documents, "Deployment", "prod-fusequeue-api"))["containers"][0]
    assert {one["secretRef"]["name"] for one in api["envFrom"] if "secretRef" in one} <= names


def test_the_example_names_every_component_and_renders() -> None:
    """Those that are not in use are comments."""
    text = (FOLDER / "example" / "kustomization.yaml").read_text("utf-8")
    listed = {line.strip(" #-") for line in text.splitlines() if "../components/" in line}
    expected = {f"../components/{name}" for name in COMPONENTS}
    assert listed == expected | {f"../components/{name}/addresses" for name in ADDRESSES}
    documents = render_folder(FOLDER / "example")
    assert [found for one in documents if (found := faults(one))] == []
    scaled = named(documents, "ScaledObject", "fusequeue-worker")["spec"]
    assert scaled["triggers"][0]["metadata"]["url"].startswith("http://fusequeue-api.fusequeue.svc/")


def test_the_example_renders_with_every_component_and_a_prefix(tmp_path: Path) -> None:
    """As a user would edit it: its comments are complete lines, and its patch for the volume has no target then."""
    folder = tmp_path / "kubernetes"
    shutil.copytree(FOLDER, folder)
    shutil.copytree(FOLDER.parent / "grafana", tmp_path / "grafana")  # the dashboard
    path = folder / "example" / "kustomization.yaml"
    path.write_text(re.sub(r"^( *)# (-|namePrefix)", r"\1\2", path.read_text("utf-8"), flags=re.M), "utf-8")
    documents = render_folder(path.parent)
    assert [found for one in documents if (found := faults(one))] == []
    assert dangling(documents) == []
    scaled = named(documents, "ScaledObject", "prod-fusequeue-worker")["spec"]
    assert scaled["triggers"][0]["metadata"]["url"].startswith("http://prod-fusequeue-api.fusequeue.svc/")


def test_no_pod_has_access_to_the_cluster() -> None:
    for components in ((), COMPONENTS):
        documents = render(components, NAMESPACE, PREFIX)
        assert not [one for one in documents if one["kind"] in ("Role", "RoleBinding", "ServiceAccount")]
        for workload in (one for one in documents if one["kind"] in ("Deployment", "StatefulSet", "Job")):
            assert pod_of(workload)["automountServiceAccountToken"] is False, workload["metadata"]["name"]


def test_workers_without_a_gpu_say_so() -> None:
    pod = pod_of(named(render(("cpu",)), "Deployment", "fusequeue-worker"))
    (worker,) = pod["containers"]
    assert {"name": "FUSEQUEUE_DEVICE", "value": "cpu"} in worker["env"]
    assert list(worker["resources"]["limits"]) == ["memory"]
    assert "tolerations" not in pod


def test_a_cache_per_worker_needs_no_shared_volume() -> None:
    documents = render(("cache-per-worker",))
    assert not [one for one in documents if one["kind"] == "PersistentVolumeClaim"]
    volumes = {one["name"]: one for one in pod_of(named(documents, "Deployment", "fusequeue-worker"))["volumes"]}
    template = volumes["cache"]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert template["accessModes"] == ["ReadWriteOnce"]


def test_the_api_scales_by_cpu() -> None:
    """A percentage of what it requests."""
    documents = render(("api-autoscaling",))
    api = named(documents, "Deployment", "fusequeue-api")
    assert "replicas" not in api["spec"], "else each apply would undo what was scaled"
    assert "cpu" in pod_of(api)["containers"][0]["resources"]["requests"]
    named(documents, "HorizontalPodAutoscaler", "fusequeue-api")


def test_redis_of_the_trial_has_a_password_and_room_to_rewrite_its_file() -> None:
    """While the append-only file is rewritten, changed pages exist twice; above the limit Redis is killed."""
    documents = render(("trial",), NAMESPACE, PREFIX)
    (redis,) = pod_of(named(documents, "StatefulSet", "prod-fusequeue-redis"))["containers"]
    arguments = dict(itertools.pairwise(redis["args"]))
    assert arguments["--requirepass"] == "$(REDISCLI_AUTH)"
    assert arguments["--maxmemory-policy"] == "noeviction"
    (password,) = redis["env"]
    assert (password["name"], password["valueFrom"]["secretKeyRef"]["key"]) == ("REDISCLI_AUTH", "REDIS_PASSWORD")
    limit = redis["resources"]["limits"]["memory"]
    assert int(arguments["--maxmemory"].removesuffix("gb")) * 2 <= int(limit.removesuffix("Gi"))
    (rule,) = named(documents, "NetworkPolicy", "prod-fusequeue-redis")["spec"]["ingress"]
    (peer,) = rule["from"]
    allowed = set(peer["podSelector"]["matchExpressions"][0]["values"])
    labels = {
        one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
        for one in documents
        if one["kind"] == "Deployment"
    }
    assert allowed == labels, "API, chores and workers, and nothing else"


def test_the_endpoint_of_the_trial_follows_its_service() -> None:
    documents = render(("trial",), NAMESPACE, PREFIX)
    service = named(documents, "Service", "prod-fusequeue-minio")
    (port,) = service["spec"]["ports"]
    (config,) = [one for one in documents if "FUSEQUEUE_S3_ENDPOINT_URL" in one.get("data", {})]
    assert config["data"]["FUSEQUEUE_S3_ENDPOINT_URL"] == "http://prod-fusequeue-minio"
    assert port["port"] == 80
    (bucket,) = pod_of(named(documents, "Job", "prod-fusequeue-bucket"))["containers"]
    read = {
        one["valueFrom"]["configMapKeyRef"]["key"] for one in bucket["env"] if "configMapKeyRef" in one["valueFrom"]
    }
    assert read == {"FUSEQUEUE_S3_ENDPOINT_URL", "FUSEQUEUE_S3_BUCKET"}


def test_workers_of_a_model_over_two_devices_have_two_gpus_and_shared_memory() -> None:
    container = pod_of(named(render(("two-gpus",)), "Deployment", "fusequeue-worker"))["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    assert {"/dev/shm", "/etc/fusequeue/models.toml", "/models", "/tmp"} == mounts
