"""Pages of sorted sets, whose cursors stay valid when their items are deleted."""

from typing import Any

from shared.errors import InvalidRequest
from shared.runtime.clock import id_time_ms


async def start_after(redis: Any, index: str, after: str, *, newest_first: bool = True) -> int:
    """Return the rank that follows the item with the id `after`; for a deleted one, it follows from the id's time.

    Raises `InvalidRequest` for an id without a time.
    """
    rank = await (redis.zrevrank if newest_first else redis.zrank)(index, after)
    if rank is not None:
        return int(rank) + 1
    at_ms = id_time_ms(after)
    if at_ms is None:
        raise no_cursor()
    return await _rank(redis, index, at_ms, after, newest_first)


async def page_after(
    redis: Any, index: str, after: str | None, limit: int, *, newest_first: bool = True
) -> tuple[list[str], str | None]:
    """Return up to `limit` members and the cursor of the next page: the score and the member of the last one."""
    start = 0
    if after is not None:
        at, _, member = after.partition(":")
        if not at.isdecimal() or len(at) > len(str(2**53)) or not member:
            raise no_cursor()
        start = await _rank(redis, index, int(at), member, newest_first)
    rows = await redis.zrange(index, start, start + limit, desc=newest_first, withscores=True)
    members = [str(member) for member, _ in rows[:limit]]
    return members, f"{rows[limit - 1][1]:.0f}:{members[-1]}" if len(rows) > limit else None


def no_cursor() -> InvalidRequest:
    return InvalidRequest("after: not a cursor of this list; pass the `next_cursor` of a page", param="after")


async def _rank(redis: Any, index: str, score: int, member: str, newest_first: bool) -> int:
    """Return the rank that follows a member, which can be deleted. Thousands can have the same score."""
    low = int(await redis.zcount(index, "-inf", f"({score}"))
    high = low + int(await redis.zcount(index, score, score))
    while low < high:  # equal scores are ordered by member
        middle = (low + high) // 2
        found = await redis.zrange(index, middle, middle)
        if found and (found[0] < member or (found[0] == member and not newest_first)):
            low = middle + 1
        else:
            high = middle
    return int(await redis.zcard(index)) - low if newest_first else low
