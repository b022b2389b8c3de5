"""Uploaded adapters in Redis: their records, and the layers of models that they are checked against."""

import json
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from shared.config.adapters import UploadedAdapter
from shared.config.models_file import ModelSpec
from shared.errors import Conflict, NotFound
from shared.inputs.adapter_store import prefix
from shared.queue.api_keys import quota_exceeded
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.records import ExpiredItem, page_after

_UPLOAD_MS = 3_600_000  # an unfinished upload is deleted after this time
_LAYERS_MS = 30 * 86_400_000
_MAX_LAYERS_BYTES = 1024 * 1024  # those of SDXL take 110 KB


class Adapters(QueueComponent):
    """A tenant has at most `max_adapters_per_tenant`, all tenants `max_adapters`, unfinished uploads included."""

    async def begin(self, tenant: str, adapter_id: str, size: int, parts: int) -> None:
        """Count an upload of `size` bytes in `parts`, which is deleted unless `put` follows in an hour.

        Raises `Conflict` at a limit, `QuotaExceeded`.
        """
        own, all_tenants = self._settings.max_adapters_per_tenant, self._settings.max_adapters
        result = await self._scripts.begin_adapter(tenant, adapter_id, size, parts, own, all_tenants, _UPLOAD_MS)
        if result == "tenant_full":
            raise Conflict(f"too many adapters: a tenant has at most {own}; delete some first")
        if result == "full":
            raise Conflict(f"too many adapters: the service has the maximum of {all_tenants}; delete some first")
        if result != "ok":
            raise quota_exceeded(tenant, result)

    async def put(self, tenant: str, adapter: UploadedAdapter) -> None:
        """Publish an adapter whose parts are stored; raises `Conflict` if its upload took too long."""
        if not await self._scripts.put_adapter(tenant, adapter.id, adapter.model_dump_json()):
            raise Conflict("the upload took too long and was given up; upload the adapter again")

    async def get(self, tenant: str, adapter_id: str) -> UploadedAdapter:
        """Return an adapter of the tenant, or raise `NotFound`."""
        (found,) = await self.get_many(tenant, [adapter_id])
        if found is None:
            raise _no_adapter(adapter_id)
        return found

    async def get_many(self, tenant: str, adapter_ids: Sequence[str]) -> list[UploadedAdapter | None]:
        """Return the tenant's adapters with these ids, in one round trip."""
        if not adapter_ids:
            return []
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for adapter_id in adapter_ids:
                    pipe.hget(self._keys.adapter(tenant, adapter_id), "record")
                records = await pipe.execute()
        return [_adapter(record) for record in records]

    async def page(
        self, tenant: str, after: str | None, limit: int, *, newest_first: bool
    ) -> tuple[list[UploadedAdapter], str | None]:
        """Return up to `limit` adapters of a tenant and the cursor of the next page; unfinished uploads are omitted."""
        with translated():
            index = self._keys.adapters(tenant)
            page, cursor = await page_after(self._redis, index, after, limit, newest_first=newest_first)
        found = await self.get_many(tenant, [adapter_id for adapter_id, _ in page])
        return [one for one in found if one is not None], cursor

    async def publish_layers(self, spec: ModelSpec, layers: Mapping[str, tuple[int, int]]) -> None:
        """Store the layers of a loaded model that adapters can change; those of a very large model are left out."""
        wire = json.dumps({"weights": _weights(spec), "layers": layers})
        if len(wire) <= _MAX_LAYERS_BYTES:
            with translated():
                await self._redis.set(self._keys.model_layers(spec.id), wire, px=_LAYERS_MS)

    async def layers(self, spec: ModelSpec) -> Mapping[str, Sequence[int]]:
        """Return inputs and outputs of the layers of a model, by path; empty if no worker has loaded it lately."""
        with translated():
            wire = await self._redis.get(self._keys.model_layers(spec.id))
        known = {} if wire is None else json.loads(wire)
        layers: Mapping[str, Sequence[int]] = known["layers"] if known.get("weights") == _weights(spec) else {}
        return layers

    async def abandon(self, tenant: str, adapter_id: str) -> None:
        """End an upload that has failed: the next sweep deletes its parts. A published adapter stays."""
        await self._scripts.forget_adapter(tenant, adapter_id, unfinished=True)

    async def forget(self, tenant: str, adapter_id: str) -> ExpiredItem:
        """Delete an adapter's record, or end its upload; remove the item from storage, then call `forget_item`.

        A sweep does both otherwise. Raises `NotFound`, or `Conflict` while a job that has not ended uses it.
        """
        result, row = await self._scripts.forget_adapter(tenant, adapter_id, unfinished=False)
        if result == "live":
            message = f"adapter {adapter_id} is used by a job that has not ended; cancel the job first"
            raise Conflict(message, param="id")
        if result != "ok":
            raise _no_adapter(adapter_id)
        return ExpiredItem("adapter", tenant, adapter_id, prefix(tenant, adapter_id), row)


def _weights(spec: ModelSpec) -> str:
    """Return what names the weights of a model; folders can have different paths on different machines."""
    return f"{spec.source.rstrip('/').rpartition('/')[2]}@{spec.revision or ''}"


def _no_adapter(adapter_id: str) -> NotFound:
    return NotFound(f"there is no adapter {adapter_id[:64]}, or it has been deleted", param="id")


def _adapter(record: str | None) -> UploadedAdapter | None:
    if record is None:
        return None
    try:
        return UploadedAdapter.model_validate_json(record)
    except ValidationError:
        return None
