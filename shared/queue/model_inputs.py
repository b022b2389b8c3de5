"""Inputs of models' pipelines, as the workers that have loaded them describe them."""

from collections.abc import Sequence

from pydantic import BaseModel, ValidationError

from shared.config.model_spec import ModelSpec
from shared.model_inputs import ModelInput
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated

_KEPT_MS = 30 * 86_400_000
_MAX_BYTES = 256 * 1024


class _Description(BaseModel):
    weights: str
    inputs: tuple[ModelInput, ...]


class ModelInputs(QueueComponent):
    async def publish(self, spec: ModelSpec, inputs: Sequence[ModelInput]) -> None:
        """Store the inputs of a loaded model; very many are left out."""
        wire = _Description(weights=weights_of(spec), inputs=tuple(inputs)).model_dump_json(by_alias=True)
        name = self._keys.model_inputs(spec.id)
        with translated():
            await (self._redis.set(name, wire, px=_KEPT_MS) if len(wire) <= _MAX_BYTES else self._redis.delete(name))

    async def of(self, spec: ModelSpec) -> tuple[ModelInput, ...] | None:
        """Return the inputs that the models file allows; None if no worker has loaded these weights lately."""
        with translated():
            wire = await self._redis.get(self._keys.model_inputs(spec.id))
        try:
            known = None if wire is None else _Description.model_validate_json(wire)
        except ValidationError:  # of another version
            return None
        if known is None or known.weights != weights_of(spec):
            return None
        return tuple(one for one in known.inputs if one.name in spec.extra)


def weights_of(spec: ModelSpec) -> str:
    """Return what names the weights of a model; folders can have different paths on different machines."""
    return "+".join((f"{spec.source.rstrip('/').rpartition('/')[2]}@{spec.revision or ''}", *spec.file_names))
