"""Rereads the models file while a process runs: models are added, changed and removed without a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from shared.config import models_file
from shared.config.catalog import Catalog
from shared.errors import ConfigurationError

log = structlog.get_logger()

POLL_S = 2.0
REMEDY = "correct the file; until then the models before the change are served"

Apply = Callable[[Catalog], Awaitable[None]]


class ModelsWatch:
    """Reads the models file and its batch rules at each poll, and loads them when they have changed.

    Their contents are compared, not the times of the files: a ConfigMap swaps a symbolic link, and copies can be older.
    `fault` is why the present file is not in use, None if it is.
    """

    def __init__(self, path: Path, rules: Path | None) -> None:
        self.fault: str | None = None
        self._path = path
        self._rules = rules
        self._read: object = None
        self._loaded: object = None

    async def poll(self) -> Catalog | None:
        """Return the models of a file that has changed since the last call; None if it has not, or has a fault.

        Contents count when two polls have read the same: an editor may be writing the file.
        """
        read, self._read = self._read, await asyncio.to_thread(self._contents)
        if self._read != read or read == self._loaded:
            return None
        self._loaded = read
        try:
            catalog = await asyncio.to_thread(models_file.load, self._path, self._rules)
        except ConfigurationError as error:
            self.refuse(error.message)
            return None
        self.fault = None
        return catalog

    def refuse(self, fault: str) -> None:
        """Note and log why the present file is not in use."""
        self.fault = fault
        log.error("models_file_refused", error=fault, remedy=REMEDY)

    async def follow(self, apply: Apply) -> None:
        """Poll until canceled, and wait until each change is applied; an `apply` can raise `ConfigurationError`."""
        while True:
            try:
                if (catalog := await self.poll()) is not None:
                    await apply(catalog)
            except ConfigurationError as error:
                self.refuse(error.message)
            except Exception:
                log.exception("models_file_not_applied", path=str(self._path))
            await asyncio.sleep(POLL_S)

    def _contents(self) -> tuple[bytes | str, ...]:
        """Return the contents of both files, or why they cannot be read."""
        return tuple(_contents(path) for path in (self._path, self._rules) if path is not None)


def _contents(path: Path) -> bytes | str:
    try:
        return path.read_bytes()
    except OSError as error:
        return str(error)


async def follow_models(watch: ModelsWatch, catalog: Catalog, on_change: Callable[[], None] = lambda: None) -> None:
    """Keep a catalog up to date with its file until canceled."""

    async def apply(loaded: Catalog) -> None:
        if catalog.replace(loaded):
            log.info("models_reloaded", models=[spec.id for spec in catalog])
            on_change()

    await watch.follow(apply)
