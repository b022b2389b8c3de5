"""How a call of OpenAI's protocol is answered once its job has ended."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.responses import Response

from api.errors import STATUSES, problem
from api.visit import RequestContext
from shared.errors import NotFound
from shared.job import Artifact, JobRecord, State
from shared.protocols.openai.images import ImageRequest, created_s, response_fields, usage

_PIECE_BYTES = 256 * 1024


def failed(scope: Mapping[str, Any], record: JobRecord) -> Response:
    """Return the answer that tells why a job gave no pictures; `x-should-retry` says whether another try may help."""
    code, param, retryable = "job_failed", None, False
    words = f"job {record.job.id} {record.state.value}"
    if record.state is State.CANCELED:
        code = "job_canceled"
    elif record.error is not None:
        code = record.error.code if record.error.code in STATUSES else code
        words, param, retryable = record.error.message, record.error.param, record.error.retryable
    return problem(scope, code, words, param=param, headers={"x-should-retry": "true" if retryable else "false"})


async def results(record: JobRecord, asked: ImageRequest, context: RequestContext) -> list[dict[str, Any]]:
    """Return the entries of `data`: each picture as base64, or as a URL that needs no key for a while."""
    return [await _result(record, artifact, asked, context) for artifact in record.artifacts]


async def _result(
    record: JobRecord, artifact: Artifact, asked: ImageRequest, context: RequestContext
) -> dict[str, Any]:
    more = {"revised_prompt": None, "seed": artifact.seed, "flagged": artifact.flagged}
    if asked.fields.response_format == "url":
        path = f"/v1/jobs/{record.job.id}/artifacts/{artifact.index}"
        return {"url": context.base_url + path + context.sign(record.job.id, artifact.index), **more}
    return {"b64_json": await b64(artifact.key, context), **more}


async def b64(key: str, context: RequestContext) -> str:
    """Return an object of the storage as base64, or raise `NotFound`."""
    try:
        data = await context.services.storage.read(key)
    except NotFound:
        raise NotFound("the picture is no longer in storage") from None
    return await asyncio.to_thread(lambda: base64.b64encode(data).decode("ascii"))


async def body(record: JobRecord, asked: ImageRequest, context: RequestContext) -> bytes:
    """Return the whole answer of a call that does not stream."""
    told = {
        "id": record.job.id,
        "created": created_s(record),
        "data": await results(record, asked, context),
        **response_fields(record.job, asked.fields.quality),
        "usage": usage(record.job),
    }
    return await asyncio.to_thread(lambda: json.dumps(told, separators=(",", ":")).encode())


async def pieces(whole: bytes) -> AsyncGenerator[bytes]:
    """Yield an answer piece by piece, so that a client that has hung up is noticed."""
    for start in range(0, len(whole), _PIECE_BYTES):
        yield whole[start : start + _PIECE_BYTES]
