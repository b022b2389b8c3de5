"""Pictures that jobs start from: checked, stored once for each content, kept while they are used."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote_to_bytes

from shared.config.settings import Settings
from shared.errors import FetchFailed, FetchRefused, InputRejected, NotFound
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.inputs.validation import ImageInfo, inspect
from shared.job import InputRef
from shared.storage import Storage

if TYPE_CHECKING:
    from shared.queue import Queue

T = TypeVar("T")

_ID = re.compile(r"in_[0-9a-f]{32}")
_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]+)?(;[a-z0-9=_.+-]+)*;base64", re.IGNORECASE)
# Decoding is bounded by pixels, and by these threads: so many pictures are in memory at once, decoded.
_decoders = ThreadPoolExecutor(2, "inspect-picture")


async def store_input(
    data: bytes, *, tenant: str, queue: Queue, storage: Storage, settings: Settings, param: str = "image"
) -> InputRef:
    """Check a picture's file and store it, unless the tenant has the same one already; its time starts anew.

    Raises `InputRejected` naming `param`.
    """
    if len(data) > settings.max_input_bytes:
        raise InputRejected(
            f"the picture has {len(data)} bytes; at most {settings.max_input_bytes} are allowed", param=param
        )
    input_id = f"in_{(await _on_thread(lambda: hashlib.sha256(data).hexdigest()))[:32]}"
    ref = await queue.jobs.get_input(tenant, input_id)
    if ref is not None and await _is_stored(ref, storage):
        return await queue.jobs.put_input(tenant, ref, settings.input_retention_s)
    info = await _on_thread(
        lambda: inspect(data, max_bytes=settings.max_input_bytes, max_pixels=settings.max_input_pixels, param=param)
    )
    # First the record, which brings the object's end with it, then the object: a kill in between leaves nothing behind.
    ref = ref or _new_ref(tenant, input_id, len(data), info)
    ref = await queue.jobs.put_input(tenant, ref, settings.input_retention_s)
    await storage.put(ref.key, data, ref.content_type)
    return ref


@dataclass(frozen=True)
class InputStore:
    """Where the pictures of one tenant's jobs come from and are kept. `guard` fetches URLs; unset: by the settings."""

    tenant: str
    queue: Queue
    storage: Storage
    settings: Settings
    guard: FetchGuard | None = None

    async def resolve(self, value: str, param: str = "image") -> InputRef:
        """Return the stored picture that a job's field `param` means: an input's id, a data URL or an https URL.

        Its time starts anew. Raises `InputRejected` naming `param`.
        """
        settings = self.settings
        if not _ID.fullmatch(value):
            data = await _bytes_of(value, settings, self.guard, param)
            return await store_input(
                data, tenant=self.tenant, queue=self.queue, storage=self.storage, settings=settings, param=param
            )
        ref = await self.queue.jobs.get_input(self.tenant, value)
        if ref is None or not await _is_stored(ref, self.storage):
            raise InputRejected(f"there is no input {value}, or no longer; upload it again", param=param)
        return await self.queue.jobs.put_input(self.tenant, ref, settings.input_retention_s)


def _new_ref(tenant: str, input_id: str, size: int, info: ImageInfo) -> InputRef:
    # The token keeps a picture that comes again, as the sweep removes its predecessor, from going with it.
    extension = info.content_type.removeprefix("image/")
    return InputRef(
        id=input_id,
        key=f"inputs/{tenant}/{input_id}/{secrets.token_hex(8)}.{extension}",
        content_type=info.content_type,
        bytes=size,
        width=info.width,
        height=info.height,
    )


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
        return await (guard or FetchGuard(FetchRules.of(settings))).get(value)
    except (FetchRefused, FetchFailed) as error:
        raise InputRejected(f"{param}: {error.message}", param=param) from error


def _from_data_url(value: str, max_bytes: int, param: str) -> bytes:
    head, comma, payload = value[:200].partition(",")
    if not comma or not _DATA_URL.fullmatch(head):
        raise InputRejected(f"{param}: a data URL must look like data:image/png;base64,...", param=param)
    payload = value[len(head) + 1 :]
    longest = 4 * -(-max_bytes // 3)
    # Judged before it is unescaped, where a character may take three, and again after.
    if len(payload) > 3 * longest or len(encoded := unquote_to_bytes(payload)) > longest:
        raise InputRejected(f"{param}: the data URL holds more than {max_bytes} bytes", param=param)
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise InputRejected(f"{param}: the data URL is no valid base64", param=param) from error


async def _on_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_decoders, work)
