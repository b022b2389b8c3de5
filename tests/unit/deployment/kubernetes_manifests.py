"""Kubernetes manifests without a cluster: rendered by `kubectl kustomize`, and validated, those of KEDA too."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

Document = dict[str, Any]

FOLDER = Path(__file__).resolve().parents[3] / "compose" / "kubernetes"
COMPONENTS = tuple(sorted(path.parent.name for path in (FOLDER / "components").glob("*/kustomization.yaml")))
ADDRESSES = {path.parent.parent.name for path in (FOLDER / "components").glob("*/addresses/kustomization.yaml")}
NEEDS_KUBECTL = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders the manifests")

VERSION = "1.34"
# The package reads 1.5 MB of definitions for each manifest: 0.4 s.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
# https://keda.sh/docs/latest/scalers/metrics-api and .../reference/scaledobject-spec
TRIGGER_KEYS = {"type", "name", "metadata", "metricType", "useCachedMetrics", "authenticationRef"}
METRICS_API_KEYS = {
    *("url", "format", "valueLocation", "targetValue", "activationTargetValue", "unsafeSsl", "timeout"),
    *("authMode", "method", "keyParamName", "aggregateFromKubeServiceEndpoints", "aggregationType"),
}
METRICS_API_NEEDS = {"url", "valueLocation", "targetValue"}
SECRETS = {"apiKey", "method", "keyParamName", "username", "password", "ca", "cert", "key", "token"}
SCALED_OBJECT_KEYS = {
    *("scaleTargetRef", "pollingInterval", "cooldownPeriod", "initialCooldownPeriod", "idleReplicaCount"),
    *("minReplicaCount", "maxReplicaCount", "fallback", "advanced", "triggers"),
}
MONITOR_ENDPOINT_KEYS = {"port", "path", "interval", "scrapeTimeout", "scheme", "authorization", "honorLabels"}


@cache
def render(components: tuple[str, ...] = (), namespace: str = "", prefix: str = "") -> tuple[Document, ...]:
    """Return the manifests of the base with these components in a user's kustomization."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(os.path.relpath(FOLDER, Path(folder).resolve()))
        kustomization: Document = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": namespace,
            "namePrefix": prefix,
            "resources": [str(base / "base")],
            "components": [str(base / "components" / name) for name in components],
            "transformers": [str(base / "components" / name / "addresses") for name in components if name in ADDRESSES],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), "utf-8")
        return render_folder(Path(folder))


def render_folder(folder: Path) -> tuple[Document, ...]:
    """Return the manifests of a kustomization; raises AssertionError with kustomize's message."""
    result = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert not result.stderr, result.stderr  # warnings of deprecated fields
    return tuple(document for document in yaml.load_all(result.stdout, Loader=yaml.CSafeLoader) if document)


def named(documents: Iterable[Document], kind: str, name: str) -> Document:
    """Return one of the documents."""
    found = [one for one in documents if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def pod_of(workload: Document) -> Document:
    """Return the pod of a Deployment, StatefulSet or Job."""
    pod: Document = workload["spec"]["template"]["spec"]
    return pod


def faults(document: dict[str, Any]) -> list[str]:
    """Return the errors of one manifest."""
    group = document["apiVersion"].partition("/")[0]
    if group == "keda.sh":
        return _keda(document)
    if document["kind"] == "PrometheusRule":  # promtool checks its groups
        return _unknown("PrometheusRule", document["spec"], {"groups"})
    if group == "monitoring.coreos.com":
        return _monitor(document)
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{document['kind']}: {'.'.join(map(str, error.path))}: {error.message}"]
    return []


def _keda(document: dict[str, Any]) -> list[str]:
    spec = document["spec"]
    if document["kind"] == "TriggerAuthentication":
        references = spec.get("secretTargetRef", [])
        errors = _unknown("TriggerAuthentication", spec, {"secretTargetRef"})
        for reference in references:
            errors += _unknown("secretTargetRef", reference, {"parameter", "name", "key"})
            errors += (
                []
                if reference.get("parameter") in SECRETS
                else [f"metrics-api has no parameter {reference.get('parameter')}"]
            )
        return errors
    if document["kind"] != "ScaledObject":
        return [f"{document['kind']} is not supported by this test"]
    errors = _unknown("ScaledObject", spec, SCALED_OBJECT_KEYS)
    errors += [f"scaleTargetRef lacks {key}" for key in {"name"} - spec["scaleTargetRef"].keys()]
    for trigger in spec["triggers"]:
        errors += _unknown("trigger", trigger, TRIGGER_KEYS)
        if trigger["type"] != "metrics-api":
            errors.append(f"the trigger {trigger['type']} is not supported by this test")
        metadata = trigger["metadata"]
        errors += _unknown("metadata", metadata, METRICS_API_KEYS)
        errors += [f"metadata lacks {key}" for key in sorted(METRICS_API_NEEDS - metadata.keys())]
        errors += [f"metadata.{key} must be a string" for key, value in metadata.items() if not isinstance(value, str)]
    return errors


def _monitor(document: dict[str, Any]) -> list[str]:
    spec = document["spec"]
    errors = _unknown(document["kind"], spec, {"selector", "podMetricsEndpoints", "namespaceSelector"})
    for endpoint in spec["podMetricsEndpoints"]:
        errors += _unknown("endpoint", endpoint, MONITOR_ENDPOINT_KEYS)
    return errors


def _unknown(what: str, given: dict[str, Any], known: set[str]) -> list[str]:
    return [f"{what} has no {key}" for key in sorted(given.keys() - known)]
