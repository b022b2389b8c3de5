"""Calls of the client about the service: its groups, models, queues, workers, usage and dead letters."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Unpack

from fusequeue.arguments import path_of
from fusequeue.resources.groups import Group
from fusequeue.resources.matching import LetterFilters, plain_filters
from fusequeue.resources.usage import Day, UsageGroup, UsageRow, usage_query
from fusequeue.response_types import Job
from fusequeue.service import DeadLetter, Model, QueueDepth, Scale, WorkerInfo
from fusequeue.transport import Transport


class ServiceCalls:
    """The part of `AsyncClient` that submits and changes no job of its own."""

    def __init__(self, http: Transport) -> None:
        self._http = http

    def groups(self, *, limit: int | None = None, tenant: str | None = None) -> AsyncGenerator[Group]:
        """Yield the groups of jobs, those with the latest submits first, up to `limit`.

        With a key of the scope `admin`, `tenant` can be another one.
        """
        return self._http.pages(Group, "/v1/groups", limit, {"tenant": tenant})

    async def group(self, name: str, *, tenant: str | None = None) -> Group:
        """Return the progress of a group; `matching` changes its jobs: `client.matching.pause(group=name)`."""
        params = {} if tenant is None else {"tenant": tenant}
        return await self._http.read(Group, "GET", path_of("/v1/groups", name), params=params)

    async def models(self) -> list[Model]:
        """Return the models with their defaults and limits."""
        return await self._http.listed(Model, "/v1/models")

    async def queues(self) -> list[QueueDepth]:
        """Return queued and running jobs by signature."""
        return await self._http.listed(QueueDepth, "/v1/queues")

    async def workers(self) -> list[WorkerInfo]:
        """Return the workers that are alive."""
        return await self._http.listed(WorkerInfo, "/v1/workers")

    async def scale(self, namespace: str = "default") -> Scale:
        """Return how many workers the service of this namespace wants."""
        return await self._http.read(Scale, "GET", path_of("/v1/scale", namespace))

    def usage(
        self,
        *,
        first_day: Day | None = None,
        last_day: Day | None = None,
        tenant: str | None = None,
        model: Model | str | None = None,
        group_by: Sequence[UsageGroup] = ("day", "tenant", "model"),
        limit: int | None = None,
    ) -> AsyncGenerator[UsageRow]:
        """Yield what jobs have used, by default in the last 30 days; both days (UTC) are included.

        `group_by` divides the rows. With a key of the scope `admin`, `tenant` can be another one, or `*` for all.
        """
        query = usage_query(first_day, last_day, tenant, model, group_by)
        return self._http.pages(UsageRow, "/v1/usage", limit, query)

    def dead_letters(self, *, limit: int | None = None, **filters: Unpack[LetterFilters]) -> AsyncGenerator[DeadLetter]:
        """Yield dead letters, newest first, up to `limit`; only those that match the filters."""
        return self._http.pages(DeadLetter, "/v1/dead-letters", limit, plain_filters(filters))

    async def dead_letter(self, letter: DeadLetter | Job | str) -> DeadLetter:
        """Return one dead letter by its job, or its job's id."""
        return await self._http.read(DeadLetter, "GET", path_of("/v1/dead-letters", letter))

    async def redrive(self, letter: DeadLetter | Job | str) -> None:
        """Queue the job of a dead letter again."""
        await self._http.send("POST", path_of("/v1/dead-letters", letter, "/redrive"), removes=True)

    async def purge(self, letter: DeadLetter | Job | str) -> None:
        """Delete a dead letter and the record of its job."""
        await self._http.send("DELETE", path_of("/v1/dead-letters", letter), removes=True)
