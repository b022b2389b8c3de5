"""The action log: what operators did, newest 10,000 entries, for 90 days."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from shared.errors import InvalidRequest, Unavailable
from shared.queue.client import QueueComponent
from shared.queue.connections.errors import translated

log = structlog.get_logger()

MAX_ACTIONS = 10_000
ACTIONS_KEPT_S = 90 * 86_400
MAX_TARGET_CHARS = 200
MAX_DETAIL_CHARS = 500


@dataclass(frozen=True)
class Action:
    """An operator's action. `key_id` is that of the API key; empty without keys, and for commands on Redis itself."""

    name: str
    target: str
    key_id: str = ""
    count: int = 1
    detail: str = ""


@dataclass(frozen=True)
class LoggedAction:
    """An entry of the log; `id` is its cursor."""

    id: str
    at_ms: int
    action: Action


class ActionLog(QueueComponent):
    async def record(self, action: Action) -> None:
        """Add an entry. The action has been taken: without Redis it is only in the process' log."""
        fields: dict[str, str | int] = {
            "name": action.name,
            "target": action.target[:MAX_TARGET_CHARS],
            "key": action.key_id,
            "count": action.count,
            "detail": action.detail[:MAX_DETAIL_CHARS],
        }
        log.info("operator_action", **fields)
        try:
            with translated():
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.xadd(self._keys.actions, fields, maxlen=MAX_ACTIONS, approximate=True)
                    pipe.expire(self._keys.actions, ACTIONS_KEPT_S)
                    await pipe.execute()
        except Unavailable as error:
            log.warning("action_not_logged", reason=error.message)

    async def page(self, after: str | None, limit: int) -> tuple[list[LoggedAction], str | None]:
        """Return entries, newest first, and the cursor `after` of the next page, if any."""
        if after is not None and not all(part.isdecimal() and len(part) < 20 for part in after.split("-", 1)):
            raise InvalidRequest("after: not a cursor of this list; pass the `next_cursor` of a page", param="after")
        newest = "+" if after is None else f"({after}"
        with translated():
            rows = await self._redis.xrevrange(self._keys.actions, max=newest, count=limit + 1)
        entries = [_entry(entry_id, fields) for entry_id, fields in rows[:limit]]
        return entries, entries[-1].id if len(rows) > limit else None


def _entry(entry_id: str, fields: dict[str, str]) -> LoggedAction:
    action = Action(
        fields.get("name", ""),
        fields.get("target", ""),
        fields.get("key", ""),
        int(fields.get("count", 1)),
        fields.get("detail", ""),
    )
    return LoggedAction(entry_id, int(entry_id.partition("-")[0]), action)
