"""Hostile batch files: each ends as a failed batch, or with one result for each line, in steps of bounded time."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakeredis import FakeAsyncRedis, FakeServer
from harness.http_server import ROOT

from api.protocols.openai import stored_files
from api.protocols.openai.batches.batch_files import BatchContext
from api.protocols.openai.batches.batch_runner import BatchRunner
from shared.batch import Batch, BatchStatus, File, Part, file_prefix
from shared.config import models_file
from shared.config.settings import Settings
from shared.errors import FusequeueError
from shared.queue import Queue, QueueClient
from shared.runtime.clock import SyncedClock, new_id, now_ms
from shared.storage import connect

MAX_STEP_S = 20.0
FILES_PER_TENANT = 500  # below the limits of a tenant
ENDPOINTS = ("/v1/jobs", "/v1/images/generations", "/v1/images/edits", "/v1/videos")
BOM = b"\xef\xbb\xbf"

URLS = (
    *("http://127.0.0.1/a.png", "https://127.0.0.1:443/", "https://[::1]/", "https://169.254.169.254/latest"),
    *(
        "https://localhost/",
        "ftp://example.com/",
        "file:///etc/passwd",
        "https://user:pw@example.com/",
        "//x",
        "https://",
    ),
    *("data:image/png;base64,AAAA", "data:,", "data:image/svg+xml;base64,PHN2Zy8+", "in_" + "0" * 32, "in_../../etc"),
    *(
        "https://2130706433/",
        "https://0x7f.1/",
        "https://exa mple.com/",
        "https://例え.invalid/",
        "javascript:alert(1)",
        "",
    ),
    *("https://" + "a" * 3000, "https://a\u0000b/", "\ud800", "https://xn--0.invalid/", "https://1.1.1.1:22/"),
)


@dataclass
class Findings:
    """Counts of outcomes, and what should not have happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest_step_s: float = 0.0


def _value(rng: random.Random, depth: int = 0) -> Any:
    """Return a random JSON value, often of the wrong type or far out of range."""
    plain: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice([None, True, False, 0, -1, 1, 2**63, -(2**64), 1e308, 0.1, 64, 4096]),
        lambda: rng.choice(["", "x", "a" * rng.choice([10, 1000, 100_000]), "\u0000", "\ud83d", "❤" * 50, "-1", "NaN"]),
        lambda: rng.choice(URLS),
    )
    if depth > 3 or rng.random() < 0.7:
        return rng.choice(plain)()
    if rng.random() < 0.5:
        return [_value(rng, depth + 1) for _ in range(rng.choice([0, 1, 3, 50]))]
    return {str(_value(rng, depth + 1))[:50]: _value(rng, depth + 1) for _ in range(rng.choice([0, 1, 3]))}


def _body(rng: random.Random) -> Any:
    body: dict[str, Any] = {"model": "demo", "prompt": "a red circle", "steps": 2}
    fields = ("model", "prompt", "n", "size", "steps", "seed", "image", "images", "mask", "metadata", "webhook")
    fields += ("response_format", "stream", "priority", "batch_id", "seconds", "input_reference", "unknown", "width")
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 5])):
        body[rng.choice(fields)] = _value(rng)
    return body if rng.random() < 0.95 else _value(rng)


def _line(rng: random.Random, number: int, endpoint: str, damage: float) -> bytes:
    """Return one line; with the probability `damage` it is one that no batch accepts."""
    line: dict[str, Any] = {"custom_id": f"line-{number}", "method": "POST", "url": endpoint, "body": _body(rng)}
    ascii_only = rng.random() < 0.5
    if rng.random() < damage:
        how = rng.randrange(9)
        if how < 4:
            line[rng.choice(list(line))] = _value(rng)
        elif how == 4:
            line.pop(rng.choice(list(line)))
        elif how == 5:
            return rng.choice([b"[" * 50_000 + b"]" * 50_000, b"{" * 2000, b'{"a":' * 900 + b"1" + b"}" * 900])
        elif how == 6:
            return rng.choice([b"null", b"[]", b"1" * 6000, b'"x"', b"NaN", b"\xff\xfe", b"\x00", b'{"custom_id":1}'])
        elif how == 7:
            return b'{"custom_id":"' + b"x" * rng.choice([10, 2_000_000]) + b'"'
        else:
            line["custom_id"] = "line-0"  # a duplicate
    text = json.dumps(line, ensure_ascii=ascii_only).encode("utf-8", rng.choice(["surrogatepass", "replace"]))
    if rng.random() < damage / 4:
        at = rng.randrange(len(text))
        text = text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    return text.replace(b"\n", b"")


def make(rng: random.Random, endpoint: str) -> bytes:
    """Return a file: most are valid but for their bodies, others damaged in one place, or throughout."""
    kind = rng.random()
    if kind < 0.05:
        return rng.choice([b"", b"\n" * 100_000, b"\r\n \n\t", BOM, bytes(rng.randbytes(5000)), b" " * 3_000_000])
    damage = 0.0 if kind < 0.6 else rng.choice([0.02, 0.5])
    lines = [_line(rng, number, endpoint, damage) for number in range(rng.choice([1, 2, 5, 30]))]
    ends = [rng.choice([b"\n", b"\n", b"\r\n", b"\n\n", b"\n \n"]) for _ in lines]
    data = b"".join(line + end for line, end in zip(lines, ends, strict=True))
    if rng.random() < 0.1:
        data = BOM + data
    return data if rng.random() < 0.5 else data.rstrip(b"\n")


async def _store(context: BatchContext, tenant: str, data: bytes, endpoint: str) -> Batch:
    now = now_ms()
    life = {"created_at_ms": now, "expires_at_ms": now + 600_000}
    file = File(id=new_id("file"), tenant=tenant, filename="in", purpose="batch", bytes=len(data), **life)
    await context.storage.put(f"{file_prefix(tenant, file.id)}0.jsonl", data, stored_files.CONTENT_TYPE)
    await context.queue.files.begin(tenant, file.id, len(data))
    await context.queue.files.put(file, [Part("0.jsonl", len(data))])
    names = {"output_file_id": new_id("file"), "error_file_id": new_id("file"), "base_url": "http://localhost"}
    batch = Batch(id=new_id("batch"), tenant=tenant, endpoint=endpoint, input_file_id=file.id, **names, **life)
    await context.queue.batches.create(batch)
    return batch


async def _step(context: BatchContext, batch: Batch, findings: Findings) -> bool:
    started_s = time.monotonic()
    more = await BatchRunner(context, await context.queue.batches.get(batch.tenant, batch.id)).advance()
    findings.longest_step_s = max(findings.longest_step_s, time.monotonic() - started_s)
    return more


async def _rows(context: BatchContext, tenant: str, file_id: str) -> list[dict[str, Any]]:
    parts = await context.queue.files.parts(tenant, file_id)
    chunks = stored_files.content(context.storage, tenant, file_id, parts)
    return [json.loads(row) for row in b"".join([chunk async for chunk in chunks]).splitlines()]


async def check(context: BatchContext, tenant: str, data: bytes, endpoint: str, findings: Findings) -> None:
    """Process a file to its end, canceling the jobs of its lines, and compare the results with its lines."""
    batch = await _store(context, tenant, data, endpoint)
    while await _step(context, batch, findings):
        pass
    await context.queue.batches.cancel(tenant, batch.id)
    for _ in range(20):
        while await _step(context, batch, findings):
            pass
        ended = await context.queue.batches.get(tenant, batch.id)
        if ended.status.terminal:
            break
    findings.outcomes[ended.status.value] += 1
    if ended.status is BatchStatus.FAILED:
        if not ended.errors:
            findings.problems.append("a failed batch has no errors")
        return
    rows = [
        row for file_id in (batch.output_file_id, batch.error_file_id) for row in await _rows(context, tenant, file_id)
    ]
    findings.outcomes["lines"] += len(rows)
    findings.outcomes["refused lines"] += sum(row["error"]["code"] not in ("job_canceled",) for row in rows)
    lines = [json.loads(raw)["custom_id"] for raw in data.split(b"\n") if raw.strip(b" \t\r")]
    if not ended.status.terminal or sorted(row["custom_id"] for row in rows) != sorted(lines):
        findings.problems.append(f"{len(lines)} lines have {len(rows)} results, status {ended.status.value}")
    if internal := [row for row in rows if row["error"]["code"] in ("internal_error", "job_deleted")]:
        findings.problems.append(f"internal error: {internal[0]}"[:300])


async def _run(folder: Path, seed: int, seconds: float) -> Findings:
    settings = Settings(redis_url="redis://fake.invalid:6379/0", models=ROOT / "models.toml", storage_dir=folder)
    server, findings = FakeServer(), Findings()
    client, blocking = (FakeAsyncRedis(decode_responses=True, protocol=2, server=server) for _ in range(2))
    queue = Queue(QueueClient(client, namespace="fuzz", settings=settings, blocking=blocking))
    storage = connect(settings)
    context = BatchContext(settings, models_file.load(settings.models), queue, storage, SyncedClock(now_ms()))
    until_s, number = time.monotonic() + seconds, 0
    while time.monotonic() < until_s and len(findings.problems) < 5:
        rng = random.Random(f"{seed}-{number}")
        endpoint = rng.choice(ENDPOINTS)
        data = make(rng, endpoint)
        try:
            await check(context, f"t{number // FILES_PER_TENANT}", data, endpoint, findings)
        except FusequeueError as error:
            findings.problems.append(f"file {seed}-{number}: {error.code}: {error.message}")
        except Exception:
            findings.problems.append(f"file {seed}-{number}: {traceback.format_exc(limit=-4)}")
        number += 1
    findings.outcomes["files"] = number
    if findings.longest_step_s > MAX_STEP_S:
        findings.problems.append(f"a step took {findings.longest_step_s:.1f} s")
    await storage.close()
    await queue.close()
    return findings


def run(seed: int, seconds: float) -> Mapping[str, Any]:
    """Process files of this seed for a while; the file numbers of problems repeat them."""
    with tempfile.TemporaryDirectory(prefix="fusequeue-batch-files-") as folder:
        findings = asyncio.run(_run(Path(folder), seed, seconds))
    longest = f"{findings.longest_step_s:.2f} s"
    return {**findings.outcomes, "longest step": longest, "problems": findings.problems}
