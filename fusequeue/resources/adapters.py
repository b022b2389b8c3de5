"""Adapters that the API key's tenant has uploaded."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator
from datetime import datetime
from pathlib import Path
from typing import Literal, TypedDict, Unpack

from pydantic import SkipValidation

from fusequeue.arguments import key, path_of
from fusequeue.errors import InvalidArgument
from fusequeue.params import StrPath
from fusequeue.response_types import Resource
from fusequeue.transport import Transport

PATH = "/v1/adapters"


class UploadedAdapter(Resource):
    """An adapter of the tenant; name its `id` in `adapters` of jobs of its model.

    `kind` is `lora` or `embedding`, which the word `token` in a prompt stands for.

    `source` is the URL of one that was fetched for a job, without its query.
    `warnings` of an upload are about weights of the file that may have no effect.
    """

    id: str
    model: str
    name: str
    kind: SkipValidation[Literal["lora", "embedding"]] = "lora"
    token: str | None = None
    component: str | None = None
    scale: float
    max_scale: float
    bytes: int
    sha256: str
    created_at: datetime
    source: str | None = None
    warnings: tuple[str, ...] = ()


class AdapterOptions(TypedDict, total=False):
    """Options of an upload: a `name` (by default that of the file), the `scale` of jobs that set none (1), its maximum
    (2), for a file of a model's second denoiser its `component`, such as `transformer_2`, and for an embedding its word
    in prompts, the `token` (by default that in the file, or the file's name)."""

    name: str | None
    scale: float | None
    max_scale: float | None
    component: str | None
    token: str | None


class AsyncAdapters:
    """The uploaded adapters of a service: `client.adapters`."""

    def __init__(self, http: Transport) -> None:
        self._http = http

    async def create(
        self,
        model: str,
        file: StrPath | bytes,
        *,
        idempotency_key: str | None = None,
        **options: Unpack[AdapterOptions],
    ) -> UploadedAdapter:
        """Upload a safetensors file, which is a path or bytes, for jobs of a model, and return the adapter."""
        content = await _content(file)
        data = {"model": model} | {name: str(value) for name, value in options.items() if value is not None}
        headers = {"Idempotency-Key": key(idempotency_key, uuid.uuid4().hex)}
        return await self._http.read(UploadedAdapter, "POST", PATH, files={"file": content}, data=data, headers=headers)

    def list(self, *, limit: int | None = None) -> AsyncGenerator[UploadedAdapter]:
        """Yield the adapters, newest first, up to `limit`."""
        return self._http.pages(UploadedAdapter, PATH, limit)

    async def get(self, adapter: UploadedAdapter | str) -> UploadedAdapter:
        """Return an adapter."""
        return await self._http.read(UploadedAdapter, "GET", path_of(PATH, adapter))

    async def delete(self, adapter: UploadedAdapter | str) -> None:
        """Delete an adapter; raises `RefusedError` while a job that has not ended uses it."""
        await self._http.send("DELETE", path_of(PATH, adapter), removes=True)


async def _content(file: StrPath | bytes) -> tuple[str, bytes]:
    """Return name and content of a file; raises `OSError` if it cannot be read."""
    if isinstance(file, bytes):
        return "adapter.safetensors", file
    if isinstance(file, str | os.PathLike):
        path = Path(file)
        return path.name, await asyncio.to_thread(path.read_bytes)
    raise InvalidArgument(f"file: {file!r:.80} is neither a path nor bytes")
