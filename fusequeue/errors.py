"""What can go wrong for a client.

ClientError
├── Unreachable      no answer, after all retries
├── RefusedError     the service answered with an error: status, code, param, request_id
│   ├── Unauthorized     401, 403
│   ├── NotFound         404
│   ├── Invalid          400, 413, 415, 422: `param` names the field
│   └── Busy             429, 503: retried already; `retry_after_s` says when it may go better
├── JobFailed        the job ended without a result; `job` is how it ended
└── WaitTimeout      the job has not ended in time; it goes on
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusequeue.models import Job


class ClientError(Exception):
    """Everything this package raises on purpose."""


class Unreachable(ClientError):
    """The service gave no answer, after all retries."""


class RefusedError(ClientError):
    """The service answered with an error."""

    def __init__(self, message: str, *, status: int, code: str, param: str | None, request_id: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.request_id = request_id
        self.retry_after_s: float | None = None


class Unauthorized(RefusedError):
    """The key is missing, unknown or expired, or may not do this."""


class NotFound(RefusedError):
    """There is no such job, model or picture, or it is another tenant's."""


class Invalid(RefusedError):
    """The request is at fault; `param` names the field."""


class Busy(RefusedError):
    """The service is full or away, and still was after the retries."""


class JobFailed(ClientError):
    """A job ended without a result."""

    def __init__(self, job: Job) -> None:
        reason = f": {job.error.message} ({job.error.code})" if job.error else ""
        super().__init__(f"job {job.id} {job.status}{reason}")
        self.job = job


class WaitTimeout(ClientError):
    """A job has not ended in the time the caller had; it goes on."""

    def __init__(self, job: Job, waited_s: float) -> None:
        super().__init__(f"job {job.id} is {job.status} after {waited_s:.0f} s; it goes on")
        self.job = job


_BY_STATUS: dict[int, type[RefusedError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    413: Invalid,
    415: Invalid,
    422: Invalid,
    429: Busy,
    503: Busy,
}


def refused(status: int, body: object, *, request_id: str | None, retry_after_s: float | None) -> RefusedError:
    """Return the exception for an error answer; `body` is its decoded JSON, or anything else that came."""
    told = body if isinstance(body, dict) else {}
    error = _BY_STATUS.get(status, RefusedError)
    made = error(
        str(told.get("detail") or f"the service answered {status}"),
        status=status,
        code=str(told.get("code") or f"http_{status}"),
        param=_param(told),
        request_id=request_id,
    )
    made.retry_after_s = retry_after_s
    return made


def _param(told: dict[str, object]) -> str | None:
    error = told.get("error")
    param = error.get("param") if isinstance(error, dict) else None
    return param if isinstance(param, str) else None
