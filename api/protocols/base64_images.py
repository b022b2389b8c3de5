"""Stored images as base64, for the responses of protocols that have them."""

import asyncio
import base64

from shared.errors import NotFound
from shared.storage import Storage


async def read_base64(storage: Storage, key: str) -> str:
    """Return a stored object as base64, or raise `NotFound`."""
    try:
        data = await storage.read(key)
    except NotFound:
        raise NotFound("the image is no longer in storage") from None
    return await asyncio.to_thread(lambda: base64.b64encode(data).decode("ascii"))
