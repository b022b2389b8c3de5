"""Graphs: jobs that are connected as parents and children."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.job_record import JobRecord
from shared.queue.client import QueueComponent
from shared.queue.records import record


@dataclass(frozen=True)
class JobGraph:
    """Jobs that are connected with one, the nearest first, and whether there are more of them."""

    records: Sequence[JobRecord]
    has_more: bool


class JobGraphs(QueueComponent):
    async def around(self, start: JobRecord, most: int) -> JobGraph:
        """Return up to `most` jobs of the tenant that are connected with `start`: itself first, then its parents and
        children, then theirs."""
        found, seen = [start], {start.job.id}
        level, has_more = [start], False
        while level:
            room = most - len(found)
            ids = [one for one in await self._connected(level, most) if one not in seen]
            has_more |= len(ids) > room
            level = await self._records(start.job.tenant, ids[:room])
            seen.update(ids)
            found += level
        return JobGraph(found, has_more)

    async def _connected(self, records: Sequence[JobRecord], most: int) -> Sequence[str]:
        """Return the ids of jobs that come before some, and of their latest children, one more than `most` of each."""
        names = [self._keys.child_jobs(one.job.tenant, one.job.id) for one in records]
        children = await self._replies([("ZREVRANGE", name, 0, most) for name in names])
        earlier = [job_id for one in records for job_id in one.job.predecessors]
        return list(dict.fromkeys([*earlier, *(str(child) for ids in children for child in ids)]))

    async def _records(self, tenant: str, ids: Sequence[str]) -> list[JobRecord]:
        """Return the records of the jobs that are still kept."""
        known = map(record, await self._hashes([self._keys.job(job_id) for job_id in ids]))
        return [one for one in known if one is not None and one.job.tenant == tenant]
