"""Input images: validated, stored once per content, and kept while in use."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote_to_bytes

from shared.config.settings import Settings
from shared.errors import FetchFailed, FetchRefused, InputRejected, NotFound
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.inputs.validation import inspect
from shared.job import InputRef
from shared.storage import Storage

if TYPE_CHECKING:
    from shared.queue import Queue

T = TypeVar("T")

_ID = re.compile(r"in_[0-9a-f]{32}")
_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]+)?(;[a-z0-9=_.+-]+)*;base64", re.IGNORECASE)
# At most this many images are decoded at once.
_decoders = ThreadPoolExecutor(2, "inspect-image")


async def store_input(
    data: bytes, *, tenant: str, queue: Queue, storage: Storage, settings: Settings, param: str = "image"
) -> InputRef:
    """Validate and store an image, unless the tenant has the same one; restarts its retention.

    Raises `InputRejected` naming `param`.
    """
    if len(data) > settings.max_input_bytes:
        raise InputRejected(
            f"the image has {len(data)} bytes; at most {settings.max_input_bytes} are allowed", param=param
        )
    input_id = f"in_{(await _on_thread(lambda: hashlib.sha256(data).hexdigest()))[:32]}"
    ref = await queue.jobs.get_input(tenant, input_id)
    if ref is not None and await _is_stored(ref, storage):
        return await queue.jobs.put_input(tenant, ref, settings.input_retention_s)
    info = await _on_thread(
        lambda: inspect(data, max_bytes=settings.max_input_bytes, max_pixels=settings.max_input_pixels, param=param)
    )
    # First the record, which schedules the object's deletion: a crash before the upload leaves nothing behind.
    if ref is None:
        # With the random token, the sweep of an expired object cannot delete the same image uploaded again.
        key = f"inputs/{tenant}/{input_id}/{secrets.token_hex(8)}.{info.content_type.removeprefix('image/')}"
        ref = InputRef(id=input_id, key=key, bytes=len(data), **asdict(info))
    ref = await queue.jobs.put_input(tenant, ref, settings.input_retention_s)
    await storage.put(ref.key, data, ref.content_type)
    return ref


@dataclass(frozen=True)
class InputStore:
    """Input images of one tenant. `guard` fetches URLs; by default with the rules of the settings."""

    tenant: str
    queue: Queue
    storage: Storage
    settings: Settings
    guard: FetchGuard | None = None

    async def resolve(self, value: str, param: str = "image") -> InputRef:
        """Return the stored image of an input id, a data URL or an https URL; restarts its retention.

        Raises `InputRejected` naming `param`, the request field.
        """
        settings = self.settings
        if not _ID.fullmatch(value):
            data = await _bytes_of(value, settings, self.guard, param)
            return await store_input(
                data, tenant=self.tenant, queue=self.queue, storage=self.storage, settings=settings, param=param
            )
        ref = await self.queue.jobs.get_input(self.tenant, value)
        if ref is None or not await _is_stored(ref, self.storage):
            raise InputRejected(f"unknown or expired input: {value}; upload it again", param=param)
        return await self.queue.jobs.put_input(self.tenant, ref, settings.input_retention_s)


async def _is_stored(ref: InputRef, storage: Storage) -> bool:
    try:
        return (await storage.head(ref.key)).size == ref.bytes
    except NotFound:
        return False


async def _bytes_of(value: str, settings: Settings, guard: FetchGuard | None, param: str) -> bytes:
    scheme = value[:8].lower()
    if scheme.startswith("data:"):
        return await _on_thread(lambda: _from_data_url(value, settings.max_input_bytes, param))
    if not scheme.startswith(("http:", "https:")):
        raise InputRejected(f"{param} must be an input id (in_...), a data URL or an https URL", param=param)
    try:
        return await (guard or FetchGuard(FetchRules.for_inputs(settings))).get(value)
    except (FetchRefused, FetchFailed) as error:
        raise InputRejected(f"{param}: {error.message}", param=param) from error


def _from_data_url(value: str, max_bytes: int, param: str) -> bytes:
    head, comma, payload = value[:200].partition(",")
    if not comma or not _DATA_URL.fullmatch(head):
        raise InputRejected(f"{param}: invalid data URL; use data:image/png;base64,...", param=param)
    payload = value[len(head) + 1 :]
    limit = 4 * -(-max_bytes // 3)
    # Checked before unescaping, when a character can take three, and after.
    if len(payload) > 3 * limit or len(encoded := unquote_to_bytes(payload)) > limit:
        raise InputRejected(f"{param}: the data URL has more than {max_bytes} bytes", param=param)
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise InputRejected(f"{param}: the data URL is not valid base64", param=param) from error


async def _on_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_decoders, work)
