"""Errors as fal's clients read them."""

from typing import Any

from pydantic import BaseModel, Field
from starlette.responses import Response

from api.errors import ErrorForm, ProblemFacts
from api.protocols.fal.queue_requests import PREFIX


class FalProblem(BaseModel):
    """Every error of `/compat/fal`, as fal's clients read it."""

    detail: str | list[dict[str, Any]] = Field(description="For invalid fields a list of `loc`, `msg` and `type`.")
    message: str
    error_type: str = Field(examples=["invalid_request"])
    request_id: str


def respond(facts: ProblemFacts) -> Response:
    """Return an error as fal's clients read it: as JSON, and never 409, which they repeat."""
    detail: str | list[dict[str, Any]] = facts.detail
    if facts.status == 422:
        detail = [
            {"loc": ["body", *(fault.param or "").split(".")], "msg": fault.message, "type": fault.code}
            for fault in facts.faults
        ]
    body = FalProblem(detail=detail, message=facts.detail, error_type=facts.code, request_id=facts.request_id)
    status = 400 if facts.status == 409 else facts.status
    return Response(body.model_dump_json(), status, dict(facts.headers), "application/json")


ERRORS = ErrorForm((f"{PREFIX}/",), FalProblem, respond)
