"""HTTP responses for errors: one table from error code to status, one body for all.

Every error is `application/problem+json` (RFC 9457), with an `error` object that OpenAI's SDKs read, unless its path
belongs to a protocol with a form of its own.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from shared.errors import (
    MAX_FAULTS,
    FusequeueError,
    InvalidRequest,
    NotFound,
    QueueFull,
    RateLimited,
    Unauthenticated,
    Unavailable,
    first_of,
)
from shared.runtime.clock import new_id

log = structlog.get_logger()

UNAVAILABLE_RETRY_S = 2
MAX_DETAIL_CHARS = 1_000
MAX_PARAM_CHARS = 128


class UnsupportedMediaType(InvalidRequest, code="unsupported_media_type"): ...


class RequestTimeout(InvalidRequest, code="request_timeout"): ...


class TooManyLines(InvalidRequest, code="too_many_lines"): ...


class ParentRefused(InvalidRequest, code="parent_refused"):
    """A line of a bulk request names one that was refused, for this `reason`."""

    def __init__(self, message: str, *, param: str, reason: str) -> None:
        super().__init__(message, param=param)
        self.reason = reason


class ParentRefusedForNow(ParentRefused, retryable=True): ...


class TooManyStreams(Unavailable, code="too_many_streams"): ...


class WaitTimeout(FusequeueError, code="wait_timeout", retryable=True):
    """The job of a synchronous call has not ended in time; it continues."""


class NotReady(Unavailable, code="not_ready"): ...


class RangeNotSatisfiable(InvalidRequest, code="range_not_satisfiable"):
    """The requested range is outside an artifact of `size` bytes."""

    def __init__(self, message: str, *, size: int) -> None:
        super().__init__(message, param="Range")
        self.size = size


# code -> (HTTP status, title). Other codes are internal errors.
STATUSES: Mapping[str, tuple[int, str]] = {
    "invalid_json": (400, "The body is not valid JSON"),
    "bad_request": (400, "The request cannot be read"),
    "missing_api_key": (401, "An API key is needed"),
    "invalid_api_key": (401, "The API key is not valid"),
    "expired_api_key": (401, "The API key has expired"),
    "permission_denied": (403, "The API key lacks a scope"),
    "host_not_allowed": (403, "Only localhost is served"),
    "origin_not_allowed": (403, "Pages of other origins are not served"),
    "invalid_signature": (403, "The signed URL is not valid"),
    "not_found": (404, "Not found"),
    "model_not_found": (404, "No such model"),
    "method_not_allowed": (405, "The method is not allowed"),
    "request_timeout": (408, "The request did not arrive in time"),
    "job_canceled": (409, "The job was canceled"),
    "conflict": (409, "The state does not allow this"),
    "payload_too_large": (413, "The body is too large"),
    "unsupported_media_type": (415, "The content type is not supported"),
    "range_not_satisfiable": (416, "The range cannot be served"),
    "invalid_request": (422, "The request is invalid"),
    "too_many_lines": (422, "The bulk request has too many lines"),
    "parent_refused": (422, "The line names one that was refused"),
    "invalid_input_image": (422, "The input image cannot be used"),
    "url_not_fetched": (422, "A URL of the request does not respond"),
    "invalid_adapter": (422, "The adapter cannot be used"),
    "input_missing": (422, "An input image is no longer stored, or cannot be read"),
    "idempotency_key_reused": (422, "The Idempotency-Key was used with another body"),
    "queue_full": (429, "The queue is full"),
    "quota_exceeded": (429, "The tenant keeps or has used as much as it may"),
    "rate_limit_exceeded": (429, "Too many requests"),
    "headers_too_large": (431, "The head of the request is too large"),
    "internal_error": (500, "Internal error"),
    "job_failed": (500, "The job failed"),
    "inference_failed": (500, "The model's code failed"),
    "non_finite_latents": (500, "Denoising produced NaN or infinity"),
    "encoding_failed": (500, "The output cannot be encoded"),
    "upload_failed": (500, "The output cannot be stored"),
    "out_of_memory": (500, "The job does not fit into memory"),
    "worker_lost": (500, "The job crashed its workers"),
    "model_unavailable": (500, "The model cannot be loaded"),
    "adapter_unavailable": (500, "An adapter cannot be loaded"),
    "unavailable": (503, "Temporarily unavailable"),
    "overloaded": (503, "The process has no room for more"),
    "redis_unavailable": (503, "The queue is temporarily unavailable"),
    "redis_full": (503, "The queue has no memory left"),
    "storage_unavailable": (503, "The storage is temporarily unavailable"),
    "too_many_streams": (503, "Too many clients are waiting on streams"),
    "too_many_connections": (503, "Too many connections"),
    "not_ready": (503, "Not ready"),
    "incompatible_redis": (503, "The queue's Redis is not usable"),
    "deadline_exceeded": (504, "The job's deadline passed"),
    "wait_timeout": (504, "The job has not ended in time"),
}

_CODES_BY_STATUS = {400: "bad_request", 404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}
_TYPES_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


class ErrorObject(BaseModel):
    """The error in the form that OpenAI's SDKs read."""

    message: str
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(description="The invalid field, parameter or header.", examples=["width"])
    code: str = Field(examples=["invalid_request"])


class FaultObject(BaseModel):
    """One fault of a request."""

    message: str
    param: str | None = Field(description="The invalid field, parameter or header.", examples=["width"])
    code: str = Field(examples=["invalid_request"])


class Problem(BaseModel):
    """Every error of this API."""

    type: str = Field(examples=["urn:fusequeue:error:invalid_request"])
    title: str
    status: int
    detail: str = Field(examples=["width must be 64 to 128, not 4096"])
    code: str = Field(description="Stable; for programs.", examples=["invalid_request"])
    request_id: str
    error: ErrorObject
    errors: list[FaultObject] = Field(
        description=f"Every fault of the body, at most {MAX_FAULTS}; the first is that of `detail`."
    )


@dataclass(frozen=True)
class ProblemFacts:
    """What the response for an error says; texts are printable."""

    status: int
    title: str
    code: str
    detail: str
    param: str | None
    faults: Sequence[FaultObject]
    request_id: str
    headers: Mapping[str, str]


@dataclass(frozen=True)
class ErrorForm:
    """The form of the errors of paths that begin with one of `paths`; `model` describes their bodies."""

    paths: tuple[str, ...]
    model: type[BaseModel]
    respond: Callable[[ProblemFacts], Response]


def status_of(code: str) -> int:
    """Return the HTTP status of an error code."""
    return STATUSES.get(code, STATUSES["internal_error"])[0]


def describe(error: FusequeueError) -> dict[str, Any]:
    """Return the error of a result line of a bulk response."""
    known = error.code in STATUSES
    description: dict[str, Any] = {
        "code": error.code if known else "internal_error",
        "message": error.public[:MAX_DETAIL_CHARS] if known else "internal error",
        "param": None if error.param is None else error.param[:MAX_PARAM_CHARS],
        "status": status_of(error.code),
        "retryable": error.retryable,
    }
    if isinstance(error, QueueFull):
        description["retry_after_s"] = error.retry_after_s
    if isinstance(error, InvalidRequest):
        description["errors"] = [fault.model_dump() for fault in _faults(error)]
    return description


def problem(
    scope: Mapping[str, Any],
    code: str,
    detail: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    faults: Sequence[FaultObject] = (),
) -> Response:
    """Return the response for an error code; an unknown code becomes an internal error without its detail.

    `faults` are those of the body, by default the one that `detail` describes.
    """
    if code not in STATUSES:
        code, detail, param, faults = "internal_error", "an internal error occurred", None, ()
    status, title = STATUSES[code]
    detail = _printable(detail[:MAX_DETAIL_CHARS])
    param = None if param is None else _printable(param[:MAX_PARAM_CHARS])
    facts = ProblemFacts(
        status=status,
        title=title,
        code=code,
        detail=detail,
        param=param,
        faults=faults or (FaultObject(message=detail, param=param, code=code),),
        request_id=str(scope.get("request_id", "")),
        headers=headers or {},
    )
    return _respond_of(scope)(facts)


def _respond_of(scope: Mapping[str, Any]) -> Callable[[ProblemFacts], Response]:
    """Return what makes the errors of a request's path: a protocol's form, or ours."""
    forms: Sequence[ErrorForm] = getattr(scope["app"].state, "error_forms", ()) if "app" in scope else ()
    path = str(scope.get("path", ""))
    return next((form.respond for form in forms if path.startswith(form.paths)), problem_response)


def problem_response(facts: ProblemFacts, form: type[Problem] = Problem, error: Any = None) -> Response:
    """Return an error as `application/problem+json`; `error` stands in for the object that OpenAI's SDKs read."""
    status = facts.status
    if error is None:
        kind = _TYPES_BY_STATUS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        error = ErrorObject(message=facts.detail, type=kind, param=facts.param, code=facts.code)
    body = form(
        type=f"urn:fusequeue:error:{facts.code}",
        title=facts.title,
        status=status,
        detail=facts.detail,
        code=facts.code,
        request_id=facts.request_id,
        error=error,
        errors=list(facts.faults),
    )
    return Response(
        body.model_dump_json(),
        status,
        media_type="application/problem+json",
        headers={**({"x-should-retry": "false"} if status == 409 else {}), **facts.headers},
    )


def closing_response(code: str, detail: str, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of the response for an error code, with which a connection ends."""
    request_id = new_id("req")
    response = problem({"request_id": request_id}, code, detail, headers=headers)
    status = HTTPStatus(response.status_code)
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode("ascii")]
    lines += [name + b": " + value for name, value in response.raw_headers]
    lines += [b"x-request-id: " + request_id.encode("ascii"), b"connection: close", b"", bytes(response.body)]
    return b"\r\n".join(lines)


def for_error(scope: Mapping[str, Any], error: FusequeueError) -> Response:
    """Return the response for an error of this program."""
    headers = {}
    if isinstance(error, QueueFull):
        headers["Retry-After"] = str(max(1, error.retry_after_s))
    elif isinstance(error, RateLimited):
        headers["Retry-After"] = str(-(-error.retry_after_ms // 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    elif isinstance(error, Unauthenticated):
        reason = "" if error.code == Unauthenticated.code else ', error="invalid_token"'
        headers["WWW-Authenticate"] = f'Bearer realm="fusequeue"{reason}'
    elif isinstance(error, Unavailable):
        headers["Retry-After"] = str(UNAVAILABLE_RETRY_S)
    elif isinstance(error, RangeNotSatisfiable):
        headers["Content-Range"] = f"bytes */{error.size}"
    if status_of(error.code) >= 500:
        log.warning("request_failed", code=error.code, reason=error.message)
    faults = _faults(error) if isinstance(error, InvalidRequest) else ()
    return problem(scope, error.code, error.public, param=error.param, headers=headers, faults=faults)


def _faults(error: InvalidRequest) -> list[FaultObject]:
    return [
        FaultObject(
            message=_printable(fault.public[:MAX_DETAIL_CHARS]),
            param=None if fault.param is None else _printable(fault.param[:MAX_PARAM_CHARS]),
            code=fault.code,
        )
        for fault in error.faults
    ]


async def _fusequeue_error(request: Request, error: FusequeueError) -> Response:
    return for_error(request.scope, error)


async def _validation_error(request: Request, error: RequestValidationError) -> Response:
    faults = []
    for details in error.errors()[:MAX_FAULTS]:
        param = str(details["loc"][-1]) if details["loc"] else None
        if details["loc"][:1] == ("path",):
            return for_error(request.scope, NotFound(f"no such path: {param}: {details['msg']}", param=param))
        faults.append(InvalidRequest(f"{param}: {details['msg']}", param=param))
    return for_error(request.scope, first_of(faults))


async def _http_exception(request: Request, error: HTTPException) -> Response:
    code = _CODES_BY_STATUS.get(error.status_code, "internal_error" if error.status_code >= 500 else "bad_request")
    detail = error.detail
    if code == "not_found":
        detail = f"no such path: {request.scope['path'][:200]}; {_longer_path(request)}"
    elif code == "method_not_allowed":
        detail = f"{request.method[:20]} is not allowed on {request.scope['path'][:200]}"
        return problem(request.scope, code, detail, headers={**(error.headers or {}), **_allow_header(request)})
    return problem(request.scope, code, detail, headers=error.headers)


def _longer_path(request: Request) -> str:
    """Return the path that has a name more, or where all paths are."""
    begin = f"{request.scope['path'].rstrip('/')}/{{"
    longer = (path for path in request.app.state.methods if path.startswith(begin) and "/" not in path[len(begin) :])
    return next((f"there is {path}" for path in longer), "GET /openapi.json lists the paths")


def _allow_header(request: Request) -> dict[str, str]:
    """Return all methods of the path; the router's header names only the first matching route's."""
    path = getattr(request.scope.get("route"), "path_format", "")
    methods = request.app.state.methods.get(path)
    return {"Allow": ", ".join(sorted(methods))} if methods else {}


async def _disconnected(request: Request, error: ClientDisconnect) -> Response:
    """The client disconnected while its body was read; this response is not received."""
    return problem(request.scope, "bad_request", "the client disconnected")


def _printable(text: str) -> str:
    """Replace lone surrogates, which a client's text can contain and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    FusequeueError: _fusequeue_error,
    RequestValidationError: _validation_error,
    HTTPException: _http_exception,
    ClientDisconnect: _disconnected,
}
