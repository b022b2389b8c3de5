"""Adapters as other services name them, in one text: an id, a URL, or a repository on Hugging Face's hub."""

import re
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field

from shared.config.adapters import HUB_ID, UPLOADED_ID
from shared.config.model_spec import ModelSpec

MAX_CHARS = 2048

_HUB_ID = re.compile(HUB_ID)
_HUB_URL = re.compile(
    rf"(?:https://)?(?:www\.)?huggingface\.co/({HUB_ID})(?:/(?:resolve|blob)/([^/?#]+)/([^?#]+)(?:\?download=true)?)?/?"
)


class LoraWeight(BaseModel):
    """An adapter in `loras`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(max_length=MAX_CHARS, description="Id of an adapter, a URL, or `owner/name` on the hub.")
    scale: float | None = None


def adapters_of(loras: Sequence[LoraWeight], spec: ModelSpec) -> list[dict[str, Any]]:
    """Return `loras` as `adapters` of a job of a model."""
    ids = {one.id for one in spec.adapter}
    return [{**adapter_named(lora.path, ids), "scale": lora.scale} for lora in loras]


def adapter_named(text: str, allowed: Collection[str]) -> dict[str, Any]:
    """Return the fields of a choice of an adapter without its scale; `allowed` are the ids of the model's list."""
    if text in allowed or UPLOADED_ID.fullmatch(text):
        return {"id": text}
    if match := _HUB_URL.fullmatch(text):
        hub, revision, file = match.groups()
        return {"hub": hub} if file is None else {"hub": hub, "revision": unquote(revision), "file": unquote(file)}
    if text[:8].lower().startswith(("http://", "https://")):
        return {"url": text}
    return {"hub": text} if _HUB_ID.fullmatch(text) else {"id": text}
