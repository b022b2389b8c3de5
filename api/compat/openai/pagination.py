"""Lists as OpenAI's SDKs page through them: by the id of the last row seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

MAX_LIMIT = 100


class Page(BaseModel):
    """Which rows a client asks for."""

    after: str | None = Field(None, max_length=128, description="`last_id` of the page before.")
    limit: int = Field(20, ge=1, le=10_000, description=f"More than {MAX_LIMIT} count as {MAX_LIMIT}.")
    order: Literal["asc", "desc"] = "desc"

    @property
    def rows(self) -> int:
        return min(self.limit, MAX_LIMIT)


def listed(rows: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return the page that holds `rows`."""
    return {
        "object": "list",
        "data": list(rows),
        "first_id": rows[0]["id"] if rows else None,
        "last_id": rows[-1]["id"] if rows else None,
        "has_more": has_more,
    }
