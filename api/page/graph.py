"""Route for the graph of a job: those connected with it, as a node each."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel

from api.context import ReadContext, RequestContext
from api.http.lists import known_parameters
from shared.job import State
from shared.job_fields import OnParentFailure
from shared.job_record import JobRecord

router = APIRouter(prefix="/page", include_in_schema=False)

MAX_NODES = 50
MAX_PROMPT = 200
SHOWN = {
    *("id", "status", "queue", "paused_at", "cancel_requested", "phase", "progress"),
    *("model", "task", "prompt", "artifacts"),
}


class Graph(BaseModel):
    """Jobs with the fields `SHOWN`, the nearest first; `has_more` if others are connected with them.

    `parents` of each are those that it waits or has waited for, or starts from; it fails if one of `fails_with` does
    not succeed.
    """

    data: list[dict[str, Any]]
    has_more: bool


@router.get("/graph", dependencies=[known_parameters("job", "tenant")])
async def get_graph(context: ReadContext, job: Annotated[str, Query(max_length=64)]) -> Graph:
    """Return the jobs that are connected with a job as parents and children, up to `MAX_NODES`, with it first."""
    start = await context.find_job(job)
    graph = await context.services.queue.graphs.around(start, MAX_NODES)
    queued = (one.job.id for one in graph.records if one.state is State.QUEUED and one.paused_at_ms is None)
    await context.services.queue_positions.prepare(queued)
    return Graph(data=[await _node(record, context) for record in graph.records], has_more=graph.has_more)


async def _node(record: JobRecord, context: RequestContext) -> dict[str, Any]:
    job = record.job
    node = (await context.job_object(record)).model_dump(mode="json", include=SHOWN)
    return {
        **node,
        "prompt": job.prompt[:MAX_PROMPT],
        "artifacts": node["artifacts"][:1],
        "parents": job.predecessors,
        "fails_with": job.sources if job.on_parent_failure is OnParentFailure.RUN else job.parents,
    }
