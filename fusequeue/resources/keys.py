"""API keys, for operators: these calls need a key with the scope `admin`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any, Literal, TypeAlias

from pydantic import SkipValidation

from fusequeue.arguments import path_of, whole
from fusequeue.response_types import Resource
from fusequeue.transport import Transport

PATH = "/v1/keys"
KeyScope: TypeAlias = Literal["jobs:read", "jobs:write", "metrics"]
"""What a key may do. Keys with `admin` or `keys:create` come from `fusequeue keys create` only."""


class ApiKey(Resource):
    """An API key, without its secret; `prefix` is its beginning."""

    id: str
    prefix: str
    tenant: str
    scopes: tuple[str, ...]
    name: str = ""
    state: SkipValidation[Literal["active", "expired", "revoked"]]
    created_at: datetime
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    revoked_at: datetime | None = None


class NewApiKey(ApiKey):
    """A new key; `key` is its secret, which the service stores nowhere."""

    key: str


class AsyncKeys:
    """The API keys of a service: `client.keys`."""

    def __init__(self, http: Transport) -> None:
        self._http = http

    async def create(
        self,
        tenant: str,
        *,
        scopes: Sequence[KeyScope] = ("jobs:read", "jobs:write"),
        name: str = "",
        expires_s: int | None = None,
    ) -> NewApiKey:
        """Create a key for a tenant, which can be a new one; needs a key with the scopes `admin` and `keys:create`.

        It is sent once: a repetition would create another key.
        """
        body: dict[str, Any] = {"tenant": tenant, "scopes": [*scopes], "name": name}
        if expires_s is not None:
            body["expires_s"] = whole("expires_s", expires_s)
        return await self._http.read(NewApiKey, "POST", PATH, json=body, once=True)

    def list(self, *, tenant: str | None = None, limit: int | None = None) -> AsyncGenerator[ApiKey]:
        """Yield the keys of all tenants, or of one, newest first, up to `limit`."""
        return self._http.pages(ApiKey, PATH, limit, {"tenant": tenant})

    async def revoke(self, key: ApiKey | str) -> None:
        """Revoke a key, or the one with this id or prefix; the service refuses it within two seconds."""
        await self._http.send("DELETE", path_of(PATH, key), removes=True)
