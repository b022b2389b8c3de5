"""The adapters (LoRA) that a model allows, and which of them a job asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.errors import InvalidRequest
from shared.job import Adapter

AdapterId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
MOST_ADAPTERS = 16


class AdapterSpec(BaseModel):
    """One adapter of a model's allow-list. `source` is a folder, a file or a hub id.

    `weight_name` names the file in it, and may be left out where a folder holds one alone. `component` is the
    denoiser that the weights are for, where the model has two and the file does not tell. `scale` is what a job gets
    that names none; a job's own is at most `max_scale`, either way of zero.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: AdapterId
    source: str
    revision: str | None = None
    weight_name: Annotated[str | None, Field(pattern=r"^[^/\\]+\.safetensors$")] = None
    component: str | None = None
    scale: float = 1.0
    max_scale: Annotated[float, Field(gt=0)] = 2.0

    @model_validator(mode="after")
    def _scale_is_allowed(self) -> AdapterSpec:
        if abs(self.scale) > self.max_scale:
            raise ValueError(f"scale {self.scale} is above max_scale {self.max_scale}")
        return self

    @property
    def is_local(self) -> bool:
        return Path(self.source).is_absolute()

    def rooted(self, folder: Path) -> AdapterSpec:
        """Return it with a `source` that exists in `folder` made absolute; raises ValueError if it cannot be found."""
        beside = (folder / self.source).resolve()
        if beside.exists():
            return self.model_copy(update={"source": str(beside)})
        if not self.is_local and self.weight_name is None:
            raise ValueError(
                f"adapter {self.id!r}: {self.source!r} is no folder here, and a hub id needs a weight_name"
            )
        return self


class AdapterChoice(BaseModel):
    """An adapter as a request names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[str, Field(max_length=128, description="One of the model's `adapters`.")]
    scale: Annotated[float | None, Field(description="How strongly it is mixed in. Unset: the adapter's own.")] = None


def choose(choices: Sequence[AdapterChoice], allowed: Sequence[AdapterSpec], most: int) -> tuple[Adapter, ...]:
    """Return the adapters of a job, or raise `InvalidRequest` naming the first that the model does not allow."""
    if len(choices) > most:
        raise InvalidRequest(f"adapters are at most {most}, not {len(choices)}", param="adapters")
    specs = {spec.id: spec for spec in allowed}
    chosen: dict[str, Adapter] = {}
    for at, choice in enumerate(choices):
        spec, param = specs.get(choice.id), f"adapters.{at}"
        if spec is None:
            known = ", ".join(specs) or "none"
            raise InvalidRequest(f"adapter {choice.id!r} is not of this model; there are: {known}", param=f"{param}.id")
        if choice.id in chosen:
            raise InvalidRequest(f"adapter {choice.id!r} is named twice", param=f"{param}.id")
        scale = spec.scale if choice.scale is None else choice.scale
        if abs(scale) > spec.max_scale:
            raise InvalidRequest(
                f"the scale of {choice.id!r} is {-spec.max_scale} to {spec.max_scale}, not {scale}",
                param=f"{param}.scale",
            )
        chosen[choice.id] = Adapter(id=choice.id, scale=scale)
    return tuple(chosen.values())
