"""Jobs that start from an artifact of another one: as long as one of them has not ended, that one is kept."""

from collections.abc import Mapping, Sequence

from shared.queue.redis_keys import RedisKeys
from shared.queue.transactions import Transaction

UNFINISHED = ("queued", "running")
_AT_ONCE = 100  # dependents of a job whose states are read


async def unfinished_dependents(transaction: Transaction, keys: RedisKeys, job_ids: Sequence[str]) -> Mapping[str, str]:
    """Return a dependent that has not ended for each job that has one, and forget those that have.

    A job that ends forgets its sources itself: only a failover, or a worker of an earlier version, leaves one. Where
    more of these are left than are read at once, the next one counts as not ended.
    """
    members = await transaction.read(*(("ZRANGE", keys.dependents(one), 0, _AT_ONCE) for one in job_ids))
    rows = dict(zip(job_ids, members, strict=True))
    pairs = [(job_id, child) for job_id, children in rows.items() for child in children[:_AT_ONCE]]
    states = await transaction.read(*(("HGET", keys.job(child), "state") for _, child in pairs))
    needed: dict[str, str] = {}
    for (job_id, child), state in zip(pairs, states, strict=True):
        if state in UNFINISHED:
            needed.setdefault(job_id, child)
        else:
            transaction.write("ZREM", keys.dependents(job_id), child)
    return {job_id: children[_AT_ONCE] for job_id, children in rows.items() if len(children) > _AT_ONCE} | needed
