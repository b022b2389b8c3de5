"""Adapters: LoRA weights that a model allows, those that tenants upload, and those of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.errors import InvalidRequest

MAX_ADAPTERS = 16

UPLOADED_ID = re.compile(r"adapter_[0-9a-hjkmnp-tv-z]{26}")
"""Ids of uploaded adapters."""


class AdapterSpec(BaseModel):
    """An allowed adapter. `source` is a folder, a file or a hub id.

    `weight_name` is the file in it, optional for a folder with a single one. `component` is the denoiser of the weights
    if the model has two and the file does not name one. `scale` is the default; |scale| is at most `max_scale`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
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

    def resolve_path(self, folder: Path) -> AdapterSpec:
        """Return the spec with an absolute `source` if it exists in `folder`; raises `ValueError` if it is nowhere."""
        path = (folder / self.source).resolve()
        if path.exists():
            return self.model_copy(update={"source": str(path)})
        if not self.is_local and self.weight_name is None:
            raise ValueError(f"adapter {self.id!r}: no such folder: {self.source!r}; a hub id needs a weight_name")
        return self


class UploadedAdapter(BaseModel):
    """An adapter that a tenant has uploaded for one model, stored in `parts` objects; `sha256` is that of its file."""

    model_config = ConfigDict(frozen=True)

    id: str
    model: str
    name: str
    component: str | None = None
    scale: float = 1.0
    max_scale: float = 2.0
    bytes: int
    parts: int
    sha256: str
    created_at_ms: int


class AdapterChoice(BaseModel):
    """An adapter in a request."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[
        str, Field(max_length=128, description="One of the model's `adapters`, or the id of an uploaded one.")
    ]
    scale: Annotated[float | None, Field(description="Weight of the adapter. Unset: its default.")] = None


class Adapter(BaseModel):
    """An allowed LoRA adapter and its weight."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    scale: float = 1.0


def uploaded_ids(adapters: Sequence[AdapterChoice | Adapter], allowed: Sequence[AdapterSpec] = ()) -> list[str]:
    """Return the ids that name uploaded adapters, each once; those of a model's `allowed` adapters do not."""
    own = {spec.id for spec in allowed}
    return list(dict.fromkeys(one.id for one in adapters if UPLOADED_ID.fullmatch(one.id) and one.id not in own))


def resolve_adapters(
    choices: Sequence[AdapterChoice],
    allowed: Sequence[AdapterSpec],
    limit: int,
    uploaded: Mapping[str, UploadedAdapter] | None = None,
) -> tuple[Adapter, ...]:
    """Return the adapters of a job, or raise `InvalidRequest` for the first that is not allowed.

    `uploaded` are those of the job's tenant and model; None: they are not known yet, and are left out.
    """
    if len(choices) > limit:
        raise InvalidRequest(f"too many adapters: {len(choices)}; at most {limit} are allowed", param="adapters")
    specs: dict[str, AdapterSpec | UploadedAdapter] = {**(uploaded or {}), **{spec.id: spec for spec in allowed}}
    unknown_yet = () if uploaded is not None else uploaded_ids(choices, allowed)
    chosen: dict[str, Adapter] = {}
    for at, choice in enumerate(choices):
        spec, param = specs.get(choice.id), f"adapters.{at}"
        if choice.id in chosen:
            raise InvalidRequest(f"duplicate adapter: {choice.id!r}", param=f"{param}.id")
        if spec is None and choice.id in unknown_yet:
            chosen[choice.id] = Adapter(id=choice.id)
            continue
        if spec is None:
            known = ", ".join(one.id for one in allowed) or "none"
            gone = ", or it has been deleted" if UPLOADED_ID.fullmatch(choice.id) else ""
            message = f"unknown adapter: {choice.id!r}{gone}; available: {known}, and your uploads for this model"
            raise InvalidRequest(message, param=f"{param}.id")
        scale = spec.scale if choice.scale is None else choice.scale
        if abs(scale) > spec.max_scale:
            raise InvalidRequest(
                f"invalid scale of adapter {choice.id!r}: {scale}; use {-spec.max_scale} to {spec.max_scale}",
                param=f"{param}.scale",
            )
        chosen[choice.id] = Adapter(id=choice.id, scale=scale)
    return tuple(chosen[id_] for id_ in chosen if id_ not in unknown_yet)
