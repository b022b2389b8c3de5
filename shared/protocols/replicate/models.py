"""Model names of Replicate's clients: `owner/name` and a version."""

from __future__ import annotations

import hashlib

from shared.config.models_file import Catalog, ModelSpec
from shared.errors import InvalidRequest, UnknownModel

OWNER = "fusequeue"
"""Owner of a model whose id in the models file has none."""


def owner_and_name(model: str) -> tuple[str, str]:
    """Return owner and name of a model id, which can contain the owner."""
    owner, slash, name = model.partition("/")
    return (owner, name) if slash else (OWNER, model)


def find_model(owner: str, name: str, catalog: Catalog) -> ModelSpec:
    """Return the model `owner/name`, or `name` with any owner; raises `UnknownModel`."""
    ids = [spec.id for spec in catalog]
    for model in (f"{owner}/{name}", name):
        if model in ids:
            return catalog.get(model)
    known = ", ".join("/".join(owner_and_name(model)) for model in sorted(ids))
    raise UnknownModel(f"unknown model: '{owner}/{name}'; available: {known}", param="model")


def model_version(spec: ModelSpec) -> str:
    """Return the hash of a model's id, hub source, revision and variant.

    The path of a folder is excluded, because it can differ between machines.
    """
    facts = (spec.id, "" if spec.is_folder else spec.source, spec.revision or "", spec.variant or "")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def model_of_version(version: str, catalog: Catalog) -> ModelSpec:
    """Return the model of a request's `version`: a version, `owner/name`, `owner/name:version` or a model id.

    Raises `InvalidRequest` for a version that is not served: other weights would be used silently.
    """
    name, colon, number = version.rpartition(":")
    if colon:
        spec = _by_name(name, catalog)
        if spec is not None and model_version(spec) == number:
            return spec
    else:
        match = next((spec for spec in catalog if model_version(spec) == version), None) or _by_name(version, catalog)
        if match is not None:
            return match
    raise InvalidRequest(
        f"version: not served: {version[:160]!r}; GET /v1/models lists the versions",
        param="version",
    )


def _by_name(name: str, catalog: Catalog) -> ModelSpec | None:
    owner, slash, rest = name.partition("/")
    try:
        return find_model(owner, rest, catalog) if slash else catalog.get(name)
    except UnknownModel:
        return None
