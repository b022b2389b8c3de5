"""Input images, videos and sounds in Redis: their records, and how long they are kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import ValidationError

from shared.job import InputRef
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated
from shared.queue.quotas import input_size
from shared.queue.records import page_after
from shared.queue.transactions import Transaction
from shared.runtime.clock import now_ms


@dataclass(frozen=True)
class StoredInput:
    """An input image, and when it will be deleted; None while a job uses it."""

    ref: InputRef
    expires_at_ms: int | None


class StoredInputs(QueueComponent):
    async def put(self, tenant: str, ref: InputRef, ttl_s: int) -> InputRef:
        """Store an input image's record for `ttl_s`, and as long as an unfinished job uses it; return the current one.

        Its object is deleted when both the time and the jobs have ended, so that an image stored again is not lost.
        Raises `QuotaExceeded` for a new one.
        """
        new = ref.model_dump_json()
        stored, size = object_name(ref, tenant), input_size(new, ref.bytes)

        async def attempt(transaction: Transaction) -> str:
            known = await self._keep(tenant, ref.id, 1000 * ttl_s, transaction)
            if known is not None:
                return known
            transaction.write("HSET", self._keys.input(tenant, ref.id), "ref", new, "object", stored, "size", size)
            transaction.add_size(tenant, size)
            self._restart(transaction, tenant, (ref.id, stored, size), 1000 * ttl_s)
            return new

        return _input(await self._transact(attempt)) or ref

    async def keep(self, tenant: str, input_id: str, ttl_s: int) -> InputRef | None:
        """Restart the time of a stored input image, and return it; None if there is none."""
        return _input(await self._transact(partial(self._keep, tenant, input_id, 1000 * ttl_s)))

    async def _keep(self, tenant: str, input_id: str, ttl_ms: int, transaction: Transaction) -> str | None:
        ((known, *stored),) = await transaction.read(
            ("HMGET", self._keys.input(tenant, input_id), "ref", "object", "size")
        )
        if known is None:
            return None
        self._restart(transaction, tenant, (input_id, *(value or "" for value in stored)), ttl_ms)
        return str(known)

    def _restart(self, transaction: Transaction, tenant: str, stored: tuple[str, ...], ttl_ms: int) -> None:
        """Restart the time of an input image; `stored`: its id, its object and its size.

        The row names the object: an image stored again while its old object is being deleted has its own row.
        """
        # Each submit with the image changes its uses, and each request with it its time: neither is read here. First,
        # as a command that needs no memory: then a full Redis lets a known image pass.
        transaction.call("keep_input", self._keys.input(tenant, stored[0]), ttl_ms)
        transaction.write("ZADD", self._keys.inputs(tenant), "NX", transaction.now_ms, stored[0])
        row = "|".join(("input", tenant, *stored))
        transaction.write("ZADD", self._keys.retention, "GT", transaction.now_ms + ttl_ms + 60_000, row)

    async def get_many(self, tenant: str, input_ids: Sequence[str]) -> list[StoredInput | None]:
        """Return the inputs with these ids, in one round trip."""
        names = [self._keys.input(tenant, input_id) for input_id in input_ids]
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hget(name, "ref")
                    pipe.pttl(name)
                replies = await pipe.execute() if names else []
        pairs = zip(map(_input, replies[::2]), replies[1::2], strict=True)
        now = now_ms()
        return [None if ref is None else StoredInput(ref, now + ttl if ttl >= 0 else None) for ref, ttl in pairs]

    async def page(
        self, tenant: str, after: str | None, limit: int, *, newest_first: bool
    ) -> tuple[list[StoredInput], str | None]:
        """Return up to `limit` inputs of a tenant and the cursor of the next page; some can just have expired."""
        with translated():
            page, cursor = await page_after(
                self._redis, self._keys.inputs(tenant), after, limit, newest_first=newest_first
            )
        found = await self.get_many(tenant, [input_id for input_id, _ in page])
        return [one for one in found if one is not None], cursor


def object_name(ref: InputRef, tenant: str) -> str:
    """Return the name of the object of an input image: of each upload another one."""
    return ref.key.removeprefix(f"inputs/{tenant}/{ref.id}").strip("/")


def _input(encoded: str | None) -> InputRef | None:
    try:
        return None if encoded is None else InputRef.model_validate_json(encoded)
    except ValidationError:
        return None
