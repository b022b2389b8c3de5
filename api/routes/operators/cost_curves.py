"""Route that lists the batch cost curves that workers have measured."""

import asyncio
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from api.context import ServicesDep
from api.http.lists import known_parameters
from api.http.openapi import problems
from api.jobs.job_object import iso
from shared.autoscaling.efficient_rows import efficient_rows
from shared.config.model_spec import ModelSpec
from shared.queue import CostCurve

router = APIRouter(prefix="/v1", tags=["operations"])


class CostPoint(BaseModel):
    """One point of a cost curve."""

    rows: int = Field(description="Rows of a forward: one per image.")
    seconds: float = Field(description="Of such a forward and the pipelines' own code after it.")


class CostCurveObject(BaseModel):
    """Seconds of a forward by its rows, of one shape on one kind of device."""

    object: Literal["cost_curve"] = "cost_curve"
    model: str
    device: str
    shape: str = Field(examples=["1024x1024"])
    points: list[CostPoint]
    efficient_rows: int = Field(description="The largest row count, up to `max_batch`, that lowers the cost per row.")
    measured_at: str


class CostCurveList(BaseModel):
    """The cost curves of models, those measured last first."""

    object: Literal["list"] = "list"
    data: list[CostCurveObject]


@router.get("/cost-curves", responses=problems(404, 422, 503), dependencies=[known_parameters("model")])
async def list_cost_curves(
    services: ServicesDep, model: Annotated[str | None, Query(description="Only this model.")] = None
) -> CostCurveList:
    """List the batch cost curves that workers measured in the last 30 days, up to 64 of each model."""
    specs = list(services.catalog) if model is None else [services.catalog.get(model)]
    found = await asyncio.gather(*(services.queue.workers.cost_curves(spec.id) for spec in specs))
    pairs = zip(specs, found, strict=True)
    return CostCurveList(data=[_object(curve, spec) for spec, curves in pairs for curve in curves])


def _object(curve: CostCurve, spec: ModelSpec) -> CostCurveObject:
    return CostCurveObject(
        model=curve.model,
        device=curve.device,
        shape=curve.shape,
        points=[CostPoint(rows=rows, seconds=seconds) for rows, seconds in curve.seconds.items()],
        efficient_rows=efficient_rows(curve.seconds, spec.max_batch),
        measured_at=iso(curve.measured_at_ms) or "",
    )
