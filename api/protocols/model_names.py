"""Names of models as `owner/name`, for protocols whose paths have them."""

from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.errors import UnknownModel

OWNER = "fusequeue"
"""Owner of a model whose id in the models file has none."""


def owner_and_name(model: str) -> tuple[str, str]:
    """Return owner and name of a model id, which can contain the owner."""
    owner, slash, name = model.partition("/")
    return (owner, name) if slash else (OWNER, model)


def find_model(owner: str, name: str, catalog: Catalog) -> ModelSpec:
    """Return the model `owner/name`, or `name` with any owner; raises `UnknownModel`."""
    for model in (f"{owner}/{name}", name):
        if (spec := catalog.find(model)) is not None:
            return spec
    known = ", ".join("/".join(owner_and_name(model)) for model in sorted(spec.id for spec in catalog))
    raise UnknownModel(f"unknown model: '{owner}/{name}'; available: {known}", param="model")
