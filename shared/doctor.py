"""`python -m shared.doctor`: look at everything a deployment stands on, and say what to do about what is wrong.

Prints one JSON object a finding. It needs no torch; `python -m worker.device_check` looks at the device.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from json import dumps
from pathlib import Path

import httpx

from shared.config import models_file, settings
from shared.config.models_file import ModelSpec
from shared.config.settings import Settings
from shared.errors import FusequeueError
from shared.queue import Queue
from shared.storage import connect

LEAST_FREE_BYTES = 2 * 2**30
TIMEOUT_S = 15.0


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """What was seen of one thing; `remedy` says what to do, empty where all is well."""

    name: str
    verdict: Verdict
    seen: str
    remedy: str = ""


def ok(name: str, seen: str) -> Finding:
    return Finding(name, Verdict.OK, seen)


def failed(name: str, seen: str, remedy: str) -> Finding:
    return Finding(name, Verdict.FAILED, seen, remedy)


def warning(name: str, seen: str, remedy: str) -> Finding:
    return Finding(name, Verdict.WARNING, seen, remedy)


def tell(finding: Finding) -> None:
    """Print a finding as a line of JSON."""
    print(dumps(asdict(finding)), flush=True)


def spelling() -> Iterator[Finding]:
    """Tell of environment variables that look like settings and are none."""
    for told in settings.unknown_variables(os.environ):
        yield warning("settings", told, "mend its name, or unset it")


def model_files(configured: Settings) -> Iterator[Finding]:
    """Tell of the models file, and of each model whose source is a folder."""
    try:
        served = models_file.load(configured.models, configured.batch_rules)
    except FusequeueError as error:
        yield failed("models file", error.message, "mend the file, or set FUSEQUEUE_MODELS to another")
        return
    yield ok("models file", f"{configured.models}: {', '.join(spec.id for spec in served)}")
    yield from map(_source, served)


def _source(spec: ModelSpec) -> Finding:
    name = f"model {spec.id}"
    if not spec.is_folder:
        if spec.source.startswith((".", "/")) or spec.source.count("/") != 1:
            return failed(name, f"{spec.source}: no such folder, and no hub id", "set `source` to a folder that exists")
        pinned = "" if spec.revision else "pin a `revision`, so that every worker loads the same weights"
        seen = f"{spec.source} of the hub"
        return warning(name, seen, pinned) if pinned else ok(name, f"{seen} at {spec.revision}")
    folder = Path(spec.source)
    if not (folder / "model_index.json").is_file():
        return failed(name, f"{folder} holds no model_index.json", "set `source` to a folder of save_pretrained")
    if not next(folder.rglob("*.safetensors"), None):
        return failed(name, f"{folder} holds no safetensors", "save it again with safe_serialization=True")
    return ok(name, str(folder))


async def redis(configured: Settings) -> list[Finding]:
    """Tell of the queue's Redis, and of who works on it."""
    queue = Queue.connect(configured)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            traits, workers = await queue.examine(), await queue.workers.all()
    except (FusequeueError, TimeoutError) as error:
        seen = getattr(error, "message", f"no answer within {TIMEOUT_S:.0f} s")
        return [failed("redis", seen, "start Redis, or set FUSEQUEUE_REDIS_URL; `fusequeue up` brings one along")]
    finally:
        await queue.close()
    found = [
        Finding(one.name, Verdict.FAILED if one.fatal else Verdict.WARNING, one.seen, one.remedy)
        if one.remedy
        else ok(one.name, one.seen)
        for one in traits
    ]
    if workers:
        return [*found, ok("workers", f"{len(workers)} alive")]
    return [*found, warning("workers", "none is alive", "start one: fusequeue worker")]


async def storage(configured: Settings) -> list[Finding]:
    """Tell whether objects can be written where results go, and whether there is room."""
    where = f"bucket {configured.s3_bucket}" if configured.s3_bucket else f"folder {configured.storage_dir}"
    place = connect(configured)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await place.check()
    except (FusequeueError, TimeoutError) as error:
        seen = getattr(error, "message", f"no answer within {TIMEOUT_S:.0f} s")
        name = "FUSEQUEUE_S3_*" if configured.s3_bucket else "FUSEQUEUE_STORAGE_DIR"
        return [failed("storage", seen, f"make {where} writable, or change {name}")]
    finally:
        await place.close()
    if configured.s3_bucket is None:
        free = shutil.disk_usage(configured.storage_dir).free
        if free < LEAST_FREE_BYTES:
            return [
                warning("storage", f"{where}: {free / 2**30:.1f} GiB free", "free disk space, or shorten retention")
            ]
    return [ok("storage", f"{where} can be written")]


async def api(url: str) -> list[Finding]:
    """Tell whether the API answers, and whether it says that it is ready."""
    try:
        async with httpx.AsyncClient(timeout=5) as client:
            answer = await client.get(f"{url.rstrip('/')}/readyz")
    except (httpx.TransportError, httpx.InvalidURL) as error:
        seen = f"{url}: {error or type(error).__name__}"
        return [warning("api", seen, "start it: fusequeue api; or set FUSEQUEUE_URL to where it is")]
    if answer.is_success:
        return [ok("api", f"{url} is ready")]
    return [failed("api", f"{url} answers {answer.status_code}: {answer.text[:300]}", "read its log")]


async def examine(configured: Settings) -> None:
    """Look at all of it, and tell each finding as it comes."""
    for finding in (*spelling(), *model_files(configured)):
        tell(finding)
    url = os.environ.get("FUSEQUEUE_URL") or "http://127.0.0.1:8000"
    for look in asyncio.as_completed((redis(configured), storage(configured), api(url))):
        for finding in await look:
            tell(finding)


def main() -> int:
    """Run every check that needs no torch; the findings tell what is wrong, the status only that it ran."""
    try:
        configured = settings.load()
    except FusequeueError as error:
        tell(failed("settings", error.message, "mend the variable; docs/operations.md lists them all"))
        return 0
    asyncio.run(examine(configured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
