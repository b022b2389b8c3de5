"""Uploaded and fetched adapters in Redis: their records, and the layers of models that they are checked against."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from shared.config.adapters import UploadedAdapter
from shared.config.model_spec import ModelSpec
from shared.errors import Conflict, NotFound
from shared.inputs.adapter_store import prefix
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.model_inputs import weights_of
from shared.queue.quotas import adapter_size
from shared.queue.records import ExpiredItem, page_after
from shared.queue.transactions import Transaction

_UPLOAD_MS = 3_600_000  # an unfinished upload is deleted after this time
_KEPT_UNTIL_DELETED = 2**53 - 1
_LAYERS_MS = 30 * 86_400_000
_MAX_LAYERS_BYTES = 1024 * 1024  # those of SDXL take 110 KB


@dataclass(frozen=True)
class FetchedSource:
    """Which adapter has the file of a URL, by the `digest` of model and URL, and when its host was last asked."""

    digest: str
    adapter_id: str
    etag: str | None
    checked_at_ms: int


class Adapters(QueueComponent):
    """A tenant has at most `max_adapters_per_tenant`, all tenants `max_adapters`, unfinished uploads included."""

    async def begin(self, tenant: str, adapter_id: str, size: int, parts: int) -> None:
        """Count an upload of `size` bytes in `parts`, which is deleted unless `put` follows in an hour.

        Raises `Conflict` at a limit, `QuotaExceeded`.
        """
        own, all_tenants = self._settings.max_adapters_per_tenant, self._settings.max_adapters
        name, index = self._keys.adapter(tenant, adapter_id), self._keys.adapters(tenant)
        counted = adapter_size(size, parts)
        row = _row(tenant, adapter_id, counted)

        async def attempt(transaction: Transaction) -> None:
            known, of_tenant, of_all, failed = await transaction.read(
                ("EXISTS", name),
                ("ZCARD", index),
                ("ZCARD", self._keys.all_adapters),
                ("ZSCORE", self._keys.retention, row),
            )
            if known:
                return
            if of_tenant >= own:
                raise Conflict(f"too many adapters: a tenant has at most {own}; delete some first")
            if of_all >= all_tenants:
                message = f"too many adapters: the service has the maximum of {all_tenants}; delete some first"
                raise Conflict(message)
            now = transaction.now_ms
            transaction.write("HSET", name, "size", counted)
            transaction.write("ZADD", index, now, adapter_id)
            transaction.write("ZADD", self._keys.all_adapters, now, f"{tenant}|{adapter_id}")
            transaction.write("ZADD", self._keys.retention, now + _UPLOAD_MS, row)
            if failed is None:  # otherwise counted by an upload that failed, and is not yet deleted
                transaction.add_size(tenant, counted)

        await self._transact(attempt)

    async def put(self, tenant: str, adapter: UploadedAdapter, source: FetchedSource | None = None) -> None:
        """Publish an adapter whose parts are stored; raises `Conflict` if its upload took too long.

        One with a `source` is deleted when nobody has named that for `input_retention_s`, and no job uses it.
        """
        name, retention = self._keys.adapter(tenant, adapter.id), self._keys.retention

        async def attempt(transaction: Transaction) -> None:
            (size,) = await transaction.read(("HGET", name, "size"))
            row = _row(tenant, adapter.id, size or "")
            (due,) = await transaction.read(("ZSCORE", retention, row))
            if size is None or float(due or 0) <= transaction.now_ms:  # the parts can be in deletion already
                raise Conflict("the upload took too long and was given up; upload the adapter again")
            transaction.write("HSET", name, "record", adapter.model_dump_json())
            if source is None:
                transaction.write("ZADD", retention, _KEPT_UNTIL_DELETED, row)
            else:
                self._keep(transaction, tenant, source, row)

        await self._transact(attempt, when_full=True)

    async def source(self, tenant: str, digest: str) -> tuple[FetchedSource, UploadedAdapter] | None:
        """Return what is known of a URL, and its adapter; None if there is none, or no more."""
        with translated():
            wire = await self._redis.get(self._keys.adapter_source(tenant, digest))
        if wire is None:
            return None
        source = FetchedSource(digest, **json.loads(wire))
        (adapter,) = await self.get_many(tenant, [source.adapter_id])
        return None if adapter is None else (source, adapter)

    async def keep(self, tenant: str, source: FetchedSource) -> bool:
        """Restart the retention of a fetched adapter, and store its source; False if the adapter is gone."""
        name = self._keys.adapter(tenant, source.adapter_id)

        async def attempt(transaction: Transaction) -> bool:
            (size,) = await transaction.read(("HGET", name, "size"))
            if size is not None:
                self._keep(transaction, tenant, source, _row(tenant, source.adapter_id, size))
            return size is not None

        return await self._transact(attempt, when_full=True)

    def _keep(self, transaction: Transaction, tenant: str, source: FetchedSource, row: str) -> None:
        kept_ms = 1000 * self._client.policy("input_retention_s")
        wire = json.dumps({name: value for name, value in vars(source).items() if name != "digest"})
        transaction.write("HSET", self._keys.adapter(tenant, source.adapter_id), "source", source.digest)
        transaction.write("SET", self._keys.adapter_source(tenant, source.digest), wire, "PX", kept_ms)
        transaction.write("ZADD", self._keys.retention, transaction.now_ms + kept_ms, row)

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
        wire = json.dumps({"weights": weights_of(spec), "layers": layers})
        if len(wire) <= _MAX_LAYERS_BYTES:
            with translated():
                await self._redis.set(self._keys.model_layers(spec.id), wire, px=_LAYERS_MS)

    async def layers(self, spec: ModelSpec) -> Mapping[str, Sequence[int]]:
        """Return inputs and outputs of the layers of a model, by path; empty if no worker has loaded it lately."""
        with translated():
            wire = await self._redis.get(self._keys.model_layers(spec.id))
        known = {} if wire is None else json.loads(wire)
        layers: Mapping[str, Sequence[int]] = known["layers"] if known.get("weights") == weights_of(spec) else {}
        return layers

    async def abandon(self, tenant: str, adapter_id: str) -> None:
        """End an upload that has failed: the next sweep deletes its parts. A published adapter stays."""
        await self._forget(tenant, adapter_id, unfinished=True)

    async def forget(self, tenant: str, adapter_id: str) -> ExpiredItem:
        """Delete an adapter's record, or end its upload; remove the item from storage, then call `forget_item`.

        A sweep does both otherwise. Raises `NotFound`, or `Conflict` while a job that has not ended uses it.
        """
        row = await self._forget(tenant, adapter_id, unfinished=False)
        if row is None:
            raise _no_adapter(adapter_id)
        return ExpiredItem("adapter", tenant, adapter_id, prefix(tenant, adapter_id), row)

    async def _forget(self, tenant: str, adapter_id: str, *, unfinished: bool) -> str | None:
        """Return the row of a deleted adapter in the retention; None without one. `unfinished`: only an upload."""
        name = self._keys.adapter(tenant, adapter_id)

        async def attempt(transaction: Transaction) -> str | None:
            ((size, live, published, digest),) = await transaction.read(
                ("HMGET", name, "size", "live", "record", "source")
            )
            if size is None or (unfinished and published):
                return None
            if int(live or 0) > 0 and not unfinished:
                message = f"adapter {adapter_id} is used by a job that has not ended; cancel the job first"
                raise Conflict(message, param="id")
            row = _row(tenant, adapter_id, size)
            transaction.write("DEL", name)
            if digest is not None:  # a newer adapter of the URL is fetched again
                transaction.write("DEL", self._keys.adapter_source(tenant, digest))
            transaction.write("ZREM", self._keys.adapters(tenant), adapter_id)
            transaction.write("ZREM", self._keys.all_adapters, f"{tenant}|{adapter_id}")
            transaction.write("ZADD", self._keys.retention, transaction.now_ms, row)
            return row

        return await self._transact(attempt, when_full=True)


def _row(tenant: str, adapter_id: str, size: str) -> str:
    """Return an adapter's row in the retention."""
    return f"adapter|{tenant}|{adapter_id}||{size}"


def _no_adapter(adapter_id: str) -> NotFound:
    return NotFound(f"there is no adapter {adapter_id[:64]}, or it has been deleted", param="id")


def _adapter(record: str | None) -> UploadedAdapter | None:
    if record is None:
        return None
    try:
        return UploadedAdapter.model_validate_json(record)
    except ValidationError:
        return None
