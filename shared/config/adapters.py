"""Adapters, LoRA weights and embeddings: those that a model allows, that tenants upload, and of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from shared.errors import InvalidRequest

MAX_ADAPTERS = 16

UPLOADED_ID = re.compile(r"adapter_[0-9a-hjkmnp-tv-z]{26}")
"""Ids of uploaded adapters, and of those that were fetched."""

HUB_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9._-]{1,96}"

TOKEN_PATTERN = r"^<?\w[\w.-]{0,61}>?$"
"""Words of embeddings. Brackets, colons and commas would be part of a prompt's syntax."""

FETCHED_MAX_SCALE = 4.0
"""Largest weight of an adapter named by URL, as other services allow it."""


Kind = Literal["lora", "embedding"]


def _kind(token: str | None) -> Kind:
    return "lora" if token is None else "embedding"


class AdapterSpec(BaseModel):
    """An allowed adapter. `source` is a folder, a file or a hub id.

    `weight_name` is the file in it, optional for a folder with a single one. `component` is the denoiser of the weights
    if the model has two and the file does not name one. `scale` is the default; |scale| is at most `max_scale`. With a
    `token` the file is an embedding (textual inversion), which this word in a prompt stands for, and has no scale.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
    source: str
    revision: str | None = None
    weight_name: Annotated[str | None, Field(pattern=r"^[^/\\]+\.safetensors$")] = None
    component: str | None = None
    token: Annotated[str | None, Field(pattern=TOKEN_PATTERN)] = None
    scale: float = 1.0
    max_scale: Annotated[float, Field(gt=0)] = 2.0

    @model_validator(mode="after")
    def _scale_is_allowed(self) -> AdapterSpec:
        if self.token is not None and (self.scale != 1 or self.component is not None):
            raise ValueError("an adapter with a token is an embedding, which takes no scale and no component")
        if abs(self.scale) > self.max_scale:
            raise ValueError(f"scale {self.scale} is above max_scale {self.max_scale}")
        return self

    @property
    def kind(self) -> Kind:
        return _kind(self.token)

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
    """An adapter that a tenant has uploaded for one model, stored in `parts` objects; `sha256` is that of its file.

    `source` is where one was fetched from, without the query of its URL, which can be a secret. One with a `token` is
    an embedding, which this word in a prompt stands for.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    model: str
    name: str
    component: str | None = None
    token: str | None = None
    scale: float = 1.0
    max_scale: float = 2.0
    bytes: int
    parts: int
    sha256: str
    created_at_ms: int
    source: str | None = None

    @property
    def kind(self) -> Kind:
        return _kind(self.token)


class AdapterChoice(BaseModel):
    """An adapter in a request: by id, by URL, or by its repository on the hub."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[
        str | None, Field(max_length=128, description="One of the model's `adapters`, or the id of an uploaded one.")
    ] = None
    url: Annotated[
        str | None,
        Field(max_length=2048, repr=False, description="An https URL of a safetensors file, at an allowed host."),
    ] = None
    hub: Annotated[
        str | None, Field(pattern=f"^{HUB_ID}$", description="`owner/name` on the hub, if its host is allowed.")
    ] = None
    file: Annotated[
        str | None,
        Field(
            pattern=r"^[A-Za-z0-9_][A-Za-z0-9 ._()+,=@/-]{0,250}\.safetensors$",
            description="With `hub`: the file. Unset: `pytorch_lora_weights.safetensors`, or the only one.",
        ),
    ] = None
    revision: Annotated[
        str | None,
        Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}$", description="With `hub`: branch, tag or commit."),
    ] = None
    scale: Annotated[float | None, Field(description="Weight of the adapter. Unset: its default.")] = None

    @model_validator(mode="after")
    def _names_one_place(self) -> AdapterChoice:
        if sum(name is not None for name in (self.id, self.url, self.hub)) != 1:
            raise PydanticCustomError("adapter", "send one of id, url and hub")
        if self.hub is None and (self.file is not None or self.revision is not None):
            raise PydanticCustomError("adapter", "file and revision need hub")
        texts = filter(None, (self.hub, self.file, self.revision))
        if any(part in ("", ".", "..") for text in texts for part in text.split("/")):
            raise PydanticCustomError("adapter", "hub, file and revision have no empty parts, '.' or '..'")
        return self

    @property
    def is_fetched(self) -> bool:
        return self.id is None

    @property
    def place(self) -> str:
        """The field that names it."""
        return "id" if self.id is not None else "url" if self.url is not None else "hub"

    @property
    def name(self) -> str:
        """What two choices of one adapter have in common."""
        return self.id or self.url or f"{self.hub} {self.file or ''} {self.revision or ''}"


class Adapter(BaseModel):
    """An allowed adapter and its weight, which is 1 for an embedding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    scale: float = 1.0


def uploaded_ids(adapters: Sequence[AdapterChoice | Adapter]) -> list[str]:
    """Return the ids that name uploaded adapters, each once."""
    ids = (one.id for one in adapters if one.id is not None)
    return list(dict.fromkeys(id_ for id_ in ids if UPLOADED_ID.fullmatch(id_)))


def resolve_adapters(
    choices: Sequence[AdapterChoice],
    allowed: Sequence[AdapterSpec],
    limit: int,
    uploaded: Mapping[str, UploadedAdapter] | None = None,
) -> tuple[Adapter, ...]:
    """Return the adapters of a job, or raise `InvalidRequest` for the first that is not allowed.

    `uploaded` are those of the job's tenant and model; None: they are not known yet, and are left out. So are those
    that are still to be fetched.
    """
    if len(choices) > limit:
        raise InvalidRequest(f"too many adapters: {len(choices)}; at most {limit} are allowed", param="adapters")
    specs: dict[str, AdapterSpec | UploadedAdapter] = {**(uploaded or {}), **{spec.id: spec for spec in allowed}}
    unknown_yet = () if uploaded is not None else uploaded_ids(choices)
    chosen: dict[str, Adapter] = {}
    to_fetch: set[str] = set()
    tokens: dict[str, str] = {}
    for at, choice in enumerate(choices):
        param = f"adapters.{at}"
        if choice.name in chosen or choice.name in to_fetch:
            shown = f": {choice.id!r}" if choice.id is not None else ""
            raise InvalidRequest(f"duplicate adapter{shown}", param=f"{param}.{choice.place}")
        if choice.id is None:
            to_fetch.add(choice.name)
            _check_scale(choice, FETCHED_MAX_SCALE, param)
            continue
        spec = specs.get(choice.id)
        if spec is None and choice.id in unknown_yet:
            chosen[choice.id] = Adapter(id=choice.id)
            continue
        if spec is None:
            known = ", ".join(one.id for one in allowed) or "none"
            gone = ", or it has been deleted" if UPLOADED_ID.fullmatch(choice.id) else ""
            message = f"unknown adapter: {choice.id!r}{gone}; available: {known}, and your uploads for this model"
            raise InvalidRequest(message, param=f"{param}.id")
        scale = spec.scale if choice.scale is None else choice.scale
        _check_scale(choice, spec.max_scale, param)
        if spec.token is not None:
            _check_embedding(choice, spec.token, tokens, param)
            tokens[spec.token.lower()] = choice.id
        chosen[choice.id] = Adapter(id=choice.id, scale=scale)
    return tuple(chosen[id_] for id_ in chosen if id_ not in unknown_yet)


def _check_scale(choice: AdapterChoice, most: float, param: str) -> None:
    if choice.scale is not None and abs(choice.scale) > most:
        named = f" {choice.id!r}" if choice.id is not None else ""
        message = f"invalid scale of adapter{named}: {choice.scale}; use {-most} to {most}"
        raise InvalidRequest(message, param=f"{param}.scale")


def _check_embedding(choice: AdapterChoice, token: str, others: Mapping[str, str], param: str) -> None:
    """Raise `InvalidRequest` for an embedding with a weight, or with the word of one of `others`, by lower case."""
    if choice.scale not in (None, 1.0):
        message = f"adapter {choice.id!r} is an embedding, which has no scale; leave it out"
        raise InvalidRequest(message, param=f"{param}.scale")
    if token.lower() in others:
        message = f"adapters {others[token.lower()]!r} and {choice.id!r} are embeddings of the same word, {token!r}"
        raise InvalidRequest(message, param=f"{param}.id")
