"""Our models by the names that Replicate's clients use: `owner/name`, and a version."""

from __future__ import annotations

import hashlib

from shared.config.models_file import Catalog, ModelSpec
from shared.errors import InvalidRequest, UnknownModel

OWNER = "fusequeue"
"""Whose a model is that is named without an owner in the models file."""


def owner_and_name(model: str) -> tuple[str, str]:
    """Return by which `owner/name` a model is told of; the id of one that has an owner is that already."""
    owner, slash, name = model.partition("/")
    return (owner, name) if slash else (OWNER, model)


def named(owner: str, name: str, catalog: Catalog) -> ModelSpec:
    """Return the model called `owner/name`, or, whoever is said to be its owner, `name`; raises `UnknownModel`."""
    ids = [spec.id for spec in catalog]
    for model in (f"{owner}/{name}", name):
        if model in ids:
            return catalog.get(model)
    known = ", ".join("/".join(owner_and_name(model)) for model in sorted(ids))
    raise UnknownModel(f"model '{owner}/{name}' is not served here; there are: {known}", param="model")


def version_of(spec: ModelSpec) -> str:
    """Return the version of a model: another one where its id, hub source, revision or variant is another.

    The path of a folder does not count: it may differ from machine to machine.
    """
    facts = (spec.id, "" if spec.is_folder else spec.source, spec.revision or "", spec.variant or "")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def of_version(version: str, catalog: Catalog) -> ModelSpec:
    """Return the model that a request's `version` means: a version, `owner/name`, both with a colon, or a model's id.

    Raises `InvalidRequest` for a version that is not served, so that nobody gets other weights than were asked for.
    """
    name, colon, number = version.rpartition(":")
    if colon:
        spec = _by_name(name, catalog)
        if spec is not None and version_of(spec) == number:
            return spec
    else:
        found = next((spec for spec in catalog if version_of(spec) == version), None) or _by_name(version, catalog)
        if found is not None:
            return found
    raise InvalidRequest(
        f"version: {version[:160]!r} is not served here; GET /v1/models lists the models with their versions",
        param="version",
    )


def _by_name(name: str, catalog: Catalog) -> ModelSpec | None:
    owner, slash, rest = name.partition("/")
    try:
        return named(owner, rest, catalog) if slash else catalog.get(name)
    except UnknownModel:
        return None
