"""Batches of lines, as their files and records, and their first steps."""

from __future__ import annotations

import json
from typing import Any

from api.protocols.openai import stored_files
from api.protocols.openai.batches.batch_files import BatchContext
from api.protocols.openai.batches.batch_runner import BatchRunner
from shared.batch import Batch, File, Part, file_prefix
from shared.runtime.clock import new_id, now_ms

JOBS = "/v1/jobs"


def line(number: int, **body: Any) -> dict[str, Any]:
    fields = {"model": "demo", "prompt": f"a red circle, number {number}", "steps": 2, **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": JOBS, "body": fields}


async def create(context: BatchContext, tenant: str, lines: list[dict[str, Any]], blank: int = 0) -> str:
    """Store a file with these lines, after `blank` ones, and create its batch."""
    now, data = now_ms(), blank * b"\n" + "\n".join(map(json.dumps, lines)).encode()
    file = File(
        id=new_id("file"),
        tenant=tenant,
        filename="in.jsonl",
        purpose="batch",
        bytes=len(data),
        created_at_ms=now,
        expires_at_ms=now + 600_000,
    )
    await context.storage.put(f"{file_prefix(tenant, file.id)}0.jsonl", data, stored_files.CONTENT_TYPE)
    await context.queue.files.begin(tenant, file.id, len(data))
    await context.queue.files.put(file, [Part("0.jsonl", len(data))])
    batch = Batch(
        id=new_id("batch"),
        tenant=tenant,
        endpoint=JOBS,
        input_file_id=file.id,
        output_file_id=new_id("file"),
        error_file_id=new_id("file"),
        base_url="http://localhost",
        created_at_ms=now,
        expires_at_ms=now + 600_000,
    )
    await context.queue.batches.create(batch)
    return batch.id


async def validated(context: BatchContext, tenant: str, lines: list[dict[str, Any]]) -> Batch:
    """Create a batch and run its first step."""
    batch_id = await create(context, tenant, lines)
    assert await BatchRunner(context, await context.queue.batches.get(tenant, batch_id)).advance()
    return await context.queue.batches.get(tenant, batch_id)


async def error_lines(context: BatchContext, batch: Batch) -> list[dict[str, Any]]:
    parts = await context.queue.files.parts(batch.tenant, batch.error_file_id)
    chunks = stored_files.content(context.storage, batch.tenant, batch.error_file_id, parts)
    return [json.loads(row) for row in b"".join([chunk async for chunk in chunks]).splitlines()]
