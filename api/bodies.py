"""What content a body says it is."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import Request

from api.errors import UnsupportedMediaType

JSON_TYPES = frozenset(("application/json",))
NDJSON_TYPES = frozenset(("application/x-ndjson", "application/ndjson", "application/jsonl", "application/json-lines"))
UPLOAD_TYPES = frozenset(("multipart/form-data",))


def require_type(request: Request, allowed: Collection[str]) -> None:
    """Raise `UnsupportedMediaType` unless the body says it is one of `allowed`.

    One that says nothing is refused too: a page of another site could send it without asking.
    """
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent not in allowed:
        known = " or ".join(sorted(allowed))
        raise UnsupportedMediaType(f"send the body as {known}, not as {sent[:100] or 'nothing'}", param="Content-Type")
