"""Downloads of adapters: which hosts are allowed, the URLs of files on the hub, and redirects."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import quote

import httpx

from shared.config.adapters import AdapterChoice
from shared.errors import FetchFailed, FetchInterrupted, FetchRefused
from shared.inputs.fetch_guard import FetchGuard, is_busy

SETTING = "FUSEQUEUE_ADAPTER_HOSTS"
DEFAULT_FILE = "pytorch_lora_weights.safetensors"
"""As diffusers writes adapters."""

_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_WRITE_BYTES = 1024 * 1024
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r'(?:W/)?"[\x21\x23-\x7e]{0,254}"')


@dataclass(frozen=True)
class Download:
    """A file at a URL: its size and its ETag; `is_unchanged`: it has the ETag that is known already."""

    size: int
    etag: str | None
    is_unchanged: bool = False


def check_host(host: str, allowed: Sequence[str]) -> None:
    """Raise `FetchRefused` unless the operator allows a host by its name, or as one below `*.name`."""
    if not any(host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in allowed):
        known = ", ".join(allowed) or "none"
        raise FetchRefused(f"host not allowed: {host}; the operator allows in {SETTING}: {known}")


def hub_url(hub: str, choice: AdapterChoice, file: str) -> str:
    """Return the URL of a file in a repository of the hub."""
    return f"{hub.rstrip('/')}/{choice.hub}/resolve/{quote(choice.revision or 'main', safe='')}/{quote(file)}"


def hub_listing_url(hub: str, choice: AdapterChoice) -> str:
    """Return the URL of the description of a repository, which lists its files."""
    return f"{hub.rstrip('/')}/api/models/{choice.hub}/revision/{quote(choice.revision or 'main', safe='')}"


def file_of(listing: bytes) -> str:
    """Return the file of weights in a repository by its description, or raise `FetchFailed`."""
    try:
        described: Any = json.loads(listing)
        names = {str(one["rfilename"]) for one in described["siblings"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FetchFailed("the hub does not list the files of the repository") from error
    found = sorted(name for name in names if name.endswith(".safetensors"))
    if DEFAULT_FILE in found:
        return DEFAULT_FILE
    if len(found) != 1:
        some = f": {', '.join(found[:5])}" if found else ""
        raise FetchFailed(f"the repository has {len(found)} safetensors files{some}; name one as file")
    return found[0]


def is_pinned(choice: AdapterChoice) -> bool:
    """Return whether a choice names a commit of the hub, whose files never change."""
    return choice.hub is not None and _COMMIT.fullmatch(choice.revision or "") is not None


def file_name(url: str) -> str:
    """Return the name of the file at a URL, for people."""
    return PurePosixPath(httpx.URL(url).path).name[:128] or "adapter"


async def download(
    guard: FetchGuard, url: str, file: BinaryIO, allowed: Sequence[str], etag: str | None = None
) -> Download:
    """Write the file at a URL into `file`, unless it still has the ETag `etag`.

    Redirects are followed to allowed hosts. Raises `FetchRefused`, `FetchFailed`, or `FetchInterrupted` for a host that
    does not respond or is busy.
    """
    headers = {"accept": "*/*", **({} if etag is None else {"if-none-match": etag})}
    for _ in range(_MAX_REDIRECTS + 1):
        check_host(guard.check_url(url).host, allowed)
        writer = _Writer(file)
        response = await guard.download(url, writer.add, headers)
        if response.status in _REDIRECTS:
            url = _joined(url, response.headers.get("location", ""))
            continue
        if response.status == 304 and etag is not None:
            return Download(0, etag, is_unchanged=True)
        if response.status != 200:
            error = FetchInterrupted if is_busy(response.status) else FetchFailed
            raise error(f"the URL responded with status {response.status}")
        await writer.flush()
        found = response.headers.get("etag", "")
        return Download(writer.size, found if _ETAG.fullmatch(found) else None)
    raise FetchFailed(f"the URL redirects more than {_MAX_REDIRECTS} times")


def _joined(url: str, location: str) -> str:
    try:
        return str(httpx.URL(url).join(location))
    except httpx.InvalidURL as error:
        raise FetchFailed("the URL redirects to an invalid one") from error


class _Writer:
    """Writes a body into a file in large pieces, on a thread: a full disk cache would hold up the event loop."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._pending = bytearray()
        self.size = 0

    async def add(self, chunk: bytes) -> None:
        self._pending += chunk
        self.size += len(chunk)
        if len(self._pending) >= _WRITE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        data, self._pending = bytes(self._pending), bytearray()
        try:
            await asyncio.to_thread(self._file.write, data)
        except OSError as error:
            raise FetchInterrupted(f"no room for the file: {error.strerror}; send the request again later") from error
