"""What all lists have in common: unknown parameters are refused, a larger limit is capped, cursors are opaque."""

from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Depends, Query, Request

from shared.errors import InvalidRequest, first_of
from shared.runtime.shares import SharedPool, SharedTurns

MAX_LIMIT = 100
"""Most items of a page; a larger limit is taken for this one."""

# A filtered list takes up to 0.2 s of the process: of 64 at once from one tenant, others waited for 4 s.
SCANS = SharedTurns(SharedPool("filtered_lists", 8), max_waiting=64, timeout_s=20.0)

Order = Annotated[Literal["asc", "desc"], Query(description="desc: newest first.")]
After = Annotated[str | None, Query(max_length=256, description="`next_cursor` of the previous page.")]
TIME_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "number"}]}
"""Of a time in a query: ISO 8601 or epoch seconds."""

Limit = Annotated[int, Query(ge=1, description=f"At most {MAX_LIMIT} are returned.")]


def known_parameters(*names: str, prefix: str | None = None) -> Any:
    """Return a dependency that raises `InvalidRequest` for parameters other than `names`, and for repeated ones.

    Names that begin with `prefix` are allowed too.
    """
    return Depends(_check(frozenset(names), prefix))


def _check(names: frozenset[str], prefix: str | None) -> Callable[[Request], Coroutine[Any, Any, None]]:
    async def check(request: Request) -> None:
        faults = []
        for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
            if name not in names and not (prefix and name.startswith(prefix)):
                faults.append(InvalidRequest(f"{name[:64]}: there is no such parameter", param=name))
            elif count > 1:
                faults.append(InvalidRequest(f"{name[:64]}: sent twice", param=name))
        if faults:
            raise first_of(faults)

    return check


def epoch_ms(time: datetime | None) -> int | None:
    """Return a time of a query in ms since the epoch; one without a zone is in UTC."""
    if time is None:
        return None
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
