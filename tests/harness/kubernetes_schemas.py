"""Validation of Kubernetes and KEDA manifests without a cluster."""

from __future__ import annotations

from typing import Any

import kubernetes_validate

VERSION = "1.34"
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


def faults(document: dict[str, Any]) -> list[str]:
    """Return the errors of one manifest."""
    group = document["apiVersion"].partition("/")[0]
    if group == "keda.sh":
        return _keda(document)
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
