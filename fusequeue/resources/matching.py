"""Changes of all jobs, or dead letters, that match filters."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack

from pydantic import Field

from fusequeue.arguments import finite_seconds, key, mapping
from fusequeue.errors import InvalidArgument
from fusequeue.job_fields import JobState, PriorityName
from fusequeue.response_types import Resource
from fusequeue.service import Model
from fusequeue.transport import Transport

States = JobState | Sequence[JobState] | None
Time = datetime | str | float | None
"""ISO 8601, epoch seconds, or a datetime."""


class JobFilters(TypedDict, total=False):
    """Which jobs are meant; all filters must match."""

    model: Model | str | None
    batch_id: str | None
    group: str | None
    parent: str | None
    """The id of a job that they wait or waited for, or whose result they start from."""
    prompt: str | None
    """A part of the prompt, in any case."""
    created_after: Time
    created_before: Time
    metadata: Mapping[str, str] | None


class LetterFilters(TypedDict, total=False):
    """Which dead letters are meant; all filters must match."""

    tenant: str | None
    model: Model | str | None
    reason: str | None
    at_after: Time
    at_before: Time


class Changes(Resource):
    """What was changed, or with `dry_run` would be; `skipped` match too and are not. `new_ids`: retries by old id."""

    ids: list[str] = Field(default_factory=list)
    skipped: int = 0
    dry_run: bool = False
    new_ids: dict[str, str] = Field(default_factory=dict)


class _Piece(Changes):
    has_more: bool
    next_cursor: str | None = None


class AsyncMatching:
    """Changes of all that match at least one filter: `client.matching`.

    With `dry_run` nothing changes. An operator can name another `tenant`, with a key of the scope `admin`.
    """

    def __init__(self, http: Transport) -> None:
        self._http = http

    async def cancel(
        self, *, status: States = None, tenant: str | None = None, dry_run: bool = False, **filters: Unpack[JobFilters]
    ) -> Changes:
        """Cancel jobs: queued ones at once, running ones at their next step."""
        return await self._change("POST", "/v1/jobs:cancel", job_query(status, filters, tenant=tenant), dry_run)

    async def pause(
        self, *, status: States = None, tenant: str | None = None, dry_run: bool = False, **filters: Unpack[JobFilters]
    ) -> Changes:
        """Pause jobs until they are resumed: queued ones at once, running ones at their next step."""
        return await self._change("POST", "/v1/jobs:pause", job_query(status, filters, tenant=tenant), dry_run)

    async def resume(
        self, *, status: States = None, tenant: str | None = None, dry_run: bool = False, **filters: Unpack[JobFilters]
    ) -> Changes:
        """End the pauses of jobs, which go on at their steps."""
        return await self._change("POST", "/v1/jobs:resume", job_query(status, filters, tenant=tenant), dry_run)

    async def update(
        self,
        *,
        priority: PriorityName | None = None,
        deadline_s: float | None = None,
        remove_deadline: bool = False,
        status: States = None,
        tenant: str | None = None,
        dry_run: bool = False,
        **filters: Unpack[JobFilters],
    ) -> Changes:
        """Change the priority or the deadline of queued jobs; `deadline_s` counts from now."""
        body = update_body(priority, deadline_s, remove_deadline)
        query = job_query(status, filters, tenant=tenant)
        return await self._change("POST", "/v1/jobs:update", query, dry_run, json=body)

    async def retry(
        self,
        *,
        status: States = None,
        tenant: str | None = None,
        dry_run: bool = False,
        idempotency_key: str | None = None,
        **filters: Unpack[JobFilters],
    ) -> Changes:
        """Queue new jobs with the parameters of failed, canceled and expired ones, created before the call.

        A repetition queues no more; under the same key it also retries none of the new jobs that have failed since.
        """
        headers = {"Idempotency-Key": key(idempotency_key, uuid.uuid4().hex)}
        query = job_query(status, filters, tenant=tenant)
        return await self._change("POST", "/v1/jobs:retry", query, dry_run, headers=headers)

    async def delete(
        self, *, status: States = None, tenant: str | None = None, dry_run: bool = False, **filters: Unpack[JobFilters]
    ) -> Changes:
        """Delete ended jobs and their images."""
        return await self._change("DELETE", "/v1/jobs", job_query(status, filters, tenant=tenant), dry_run)

    async def redrive(self, *, dry_run: bool = False, **filters: Unpack[LetterFilters]) -> Changes:
        """Queue the jobs of dead letters again."""
        return await self._change("POST", "/v1/dead-letters:redrive", plain_filters(filters), dry_run)

    async def purge(self, *, dry_run: bool = False, **filters: Unpack[LetterFilters]) -> Changes:
        """Delete dead letters and the records of their jobs."""
        return await self._change("POST", "/v1/dead-letters:purge", plain_filters(filters), dry_run)

    async def _change(self, method: str, path: str, query: Mapping[str, Any], dry_run: bool, **options: Any) -> Changes:
        """Change all that match, piece by piece."""
        params = {name: value for name, value in query.items() if value is not None}
        total = Changes(dry_run=dry_run)
        if dry_run:
            params["dry_run"] = "true"
        while True:
            piece = await self._http.read(_Piece, method, path, params=params, **options)
            total = Changes(
                ids=total.ids + piece.ids,
                skipped=total.skipped + piece.skipped,
                dry_run=dry_run,
                new_ids=total.new_ids | piece.new_ids,
            )
            if not piece.has_more or piece.next_cursor is None:
                return total
            params["after"] = piece.next_cursor


def job_query(status: States, filters: JobFilters, *, tenant: str | None = None) -> dict[str, Any]:
    """Return the query of filters of jobs."""
    states = status if status is None or isinstance(status, str) else ",".join(status)
    query = plain_filters(filters)
    metadata = mapping("metadata", query.pop("metadata", None))
    return {
        "status": states,
        "tenant": tenant,
        **query,
        **{f"metadata.{name}": text for name, text in metadata.items()},
    }


def update_body(priority: PriorityName | None, deadline_s: float | None, remove_deadline: bool) -> dict[str, Any]:
    """Return the body of an update, or raise `InvalidArgument` if it changes nothing."""
    body: dict[str, Any] = {} if priority is None else {"priority": priority}
    if deadline_s is not None:
        body["deadline_s"] = finite_seconds("deadline_s", deadline_s)
    if remove_deadline:
        if deadline_s is not None:
            raise InvalidArgument("remove_deadline: there is a deadline_s too; send one of them")
        body["deadline_s"] = None
    if not body:
        raise InvalidArgument("priority: nothing to change; name priority, deadline_s or remove_deadline")
    return body


def plain_filters(filters: Mapping[str, Any]) -> dict[str, Any]:
    """Return filters as texts of a query: ids of models, times in ISO 8601."""
    texts = {name: value.isoformat() for name, value in filters.items() if isinstance(value, datetime)}
    ids = {name: value.id for name, value in filters.items() if isinstance(value, Model)}
    return {**filters, **texts, **ids}
