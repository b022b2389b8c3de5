"""Facts of models, as the workers that have loaded them publish them."""

from collections.abc import Iterable

from pydantic import BaseModel, ValidationError

from shared.config.model_facts import ModelFacts
from shared.config.model_spec import ModelSpec
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.model_inputs import weights_of

_KEPT_MS = 30 * 86_400_000


class _Published(BaseModel):
    weights: str
    facts: ModelFacts


class PublishedFacts(QueueComponent):
    async def publish(self, spec: ModelSpec, facts: ModelFacts) -> None:
        """Store the facts of a loaded model."""
        wire = _Published(weights=weights_of(spec), facts=facts).model_dump_json()
        with translated():
            await self._redis.set(self._keys.model_facts(spec.id), wire, px=_KEPT_MS)

    async def of(self, specs: Iterable[ModelSpec]) -> dict[str, ModelFacts]:
        """Return the facts of models by id; not of those whose weights no worker has loaded lately."""
        listed = list(specs)
        with translated():
            wires = await self._redis.mget([self._keys.model_facts(spec.id) for spec in listed])
        read = ((spec, _read(wire)) for spec, wire in zip(listed, wires, strict=True))
        return {spec.id: one.facts for spec, one in read if one is not None and one.weights == weights_of(spec)}


def _read(wire: str | None) -> _Published | None:
    try:
        return None if wire is None else _Published.model_validate_json(wire)
    except ValidationError:  # of another version
        return None
