"""Pauses and the log of what operators did; these need a key with the scope `admin`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Literal, TypeAlias

from pydantic import SkipValidation

from fusequeue.arguments import path_of
from fusequeue.errors import InvalidArgument
from fusequeue.response_types import Resource
from fusequeue.service import Model
from fusequeue.transport import Transport

PATH = "/v1/pauses"
PauseKind: TypeAlias = Literal["all", "model", "tenant"]


class Pause(Resource):
    """What is paused: everything, or the model or tenant `name`."""

    kind: SkipValidation[PauseKind]
    name: str
    reason: str = ""
    paused_at: datetime
    key_id: str | None = None


class OperatorAction(Resource):
    """What an operator did, and to how many jobs or entries."""

    id: str
    at: datetime
    action: str
    target: str
    count: int = 1
    detail: str = ""
    key_id: str | None = None


class CostPoint(Resource):
    """Seconds of a forward with `rows` images."""

    rows: int
    seconds: float


class CostCurve(Resource):
    """Seconds of a forward by its rows, of one shape on one kind of device."""

    model: str
    device: str
    shape: str
    points: list[CostPoint]
    efficient_rows: int
    measured_at: datetime


class AsyncOperations:
    """What operators do: `client.operations`."""

    def __init__(self, http: Transport) -> None:
        self._http = http

    async def pause(
        self,
        *,
        model: Model | str | None = None,
        tenant: str | None = None,
        everything: bool = False,
        reason: str = "",
    ) -> Pause:
        """Start no job of a model, of a tenant, or at all; running jobs run on, and new ones wait."""
        path = _path(model, tenant, everything)
        return await self._http.read(Pause, "PUT", path, json={"reason": reason})

    async def resume(
        self, *, model: Model | str | None = None, tenant: str | None = None, everything: bool = False
    ) -> None:
        """End a pause."""
        await self._http.send("DELETE", _path(model, tenant, everything), removes=True)

    async def pauses(self) -> list[Pause]:
        """Return what is paused."""
        return await self._http.listed(Pause, PATH)

    def actions(self, *, limit: int | None = None) -> AsyncGenerator[OperatorAction]:
        """Yield what operators did, newest first, up to `limit`."""
        return self._http.pages(OperatorAction, "/v1/actions", limit)

    async def cost_curves(self, *, model: Model | str | None = None) -> list[CostCurve]:
        """Return what forwards cost by their rows, of one model or of all."""
        params = {} if model is None else {"model": getattr(model, "id", model)}
        return await self._http.listed(CostCurve, "/v1/cost-curves", params=params)


def _path(model: Model | str | None, tenant: str | None, everything: bool) -> str:
    if [model is not None, tenant is not None, everything].count(True) != 1:
        raise InvalidArgument("name one of: model, tenant, everything=True")
    if model is not None:
        return path_of(f"{PATH}/models", model)
    return f"{PATH}/all" if tenant is None else path_of(f"{PATH}/tenants", tenant)
