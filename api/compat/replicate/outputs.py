"""Predictions as answers: with what their SDKs can make files of."""

from __future__ import annotations

from typing import Any

from api.compat.openai.images import read_base64
from api.context import RequestContext
from shared.errors import NotFound, UnknownModel
from shared.job import JobRecord, State
from shared.protocols.replicate.models import version_of
from shared.protocols.replicate.predictions import prediction

MAX_INLINE_BYTES = 8 * 1024 * 1024
"""Pictures of one prediction that an answer over plain http holds itself; above, it holds URLs."""


def version(record: JobRecord, context: RequestContext) -> str:
    """Return the version of a job's model; empty where that is not served any more."""
    try:
        return version_of(context.services.catalog.get(record.job.model))
    except UnknownModel:
        return ""


def urls(record: JobRecord, context: RequestContext) -> list[str]:
    """Return where the pictures of a job are, each for a while without a key."""
    base = f"{context.base_url}/v1/jobs/{record.job.id}/artifacts"
    return [f"{base}/{one.index}{context.sign(record.job.id, one.index)}" for one in record.artifacts]


async def outputs(record: JobRecord, context: RequestContext) -> list[str]:
    """Return the pictures of a job as the SDKs make files of them: https URLs, and data URLs where we are spoken to by
    plain http, since they take http URLs for text."""
    small = sum(one.bytes for one in record.artifacts) <= MAX_INLINE_BYTES
    if context.base_url.startswith("https:") or not small:
        return urls(record, context)
    try:
        return [f"data:{one.content_type};base64,{await read_base64(one.key, context)}" for one in record.artifacts]
    except NotFound:  # removed as we look: the URL tells so
        return urls(record, context)


async def shown(record: JobRecord, context: RequestContext, *, state: State | None = None) -> dict[str, Any]:
    """Return one prediction, with its pictures."""
    made = await outputs(record, context) if (state or record.state) is State.SUCCEEDED else []
    return prediction(record, context.base_url, version(record, context), outputs=made, state=state)


def listed(record: JobRecord, context: RequestContext) -> dict[str, Any]:
    """Return a prediction as a page of many holds it: with URLs."""
    return prediction(record, context.base_url, version(record, context), outputs=urls(record, context))
