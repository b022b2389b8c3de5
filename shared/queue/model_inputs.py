"""Inputs of models' pipelines, as the workers that have loaded them describe them."""

from collections.abc import Sequence

from pydantic import TypeAdapter

from shared.config.models_file import ModelSpec
from shared.model_inputs import ModelInput
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated

_KEPT_MS = 30 * 86_400_000
_MAX_BYTES = 256 * 1024
_INPUTS = TypeAdapter(tuple[ModelInput, ...])


class ModelInputs(QueueComponent):
    async def publish(self, spec: ModelSpec, inputs: Sequence[ModelInput]) -> None:
        """Store the inputs of a loaded model; very many are left out."""
        wire = _INPUTS.dump_json(tuple(inputs), by_alias=True)
        if len(wire) <= _MAX_BYTES:
            with translated():
                await self._redis.set(self._keys.model_inputs(spec.id), wire, px=_KEPT_MS)

    async def of(self, spec: ModelSpec) -> tuple[ModelInput, ...] | None:
        """Return the inputs that the models file allows; None if no worker has loaded the model lately."""
        with translated():
            wire = await self._redis.get(self._keys.model_inputs(spec.id))
        if wire is None:
            return None
        return tuple(one for one in _INPUTS.validate_json(wire) if one.name in spec.extra)
