"""Exceptions of the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusequeue.resources import Job


class ClientError(Exception):
    """Base class of this package's exceptions."""


class Unreachable(ClientError):
    """The service did not respond, also after the retries."""


class RefusedError(ClientError):
    """The service responded with an error."""

    def __init__(self, message: str, *, status: int, code: str, param: str | None, request_id: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.request_id = request_id
        self.retry_after_s: float | None = None


class Unauthorized(RefusedError):
    """401, 403: the API key is missing, unknown, expired, or lacks the scope."""


class NotFound(RefusedError):
    """404: the job, model or image does not exist, or belongs to another tenant."""


class Invalid(RefusedError):
    """400, 413, 415, 422: the request is invalid; `param` names the field."""


class Busy(RefusedError):
    """429, 503: the service is full or unavailable, also after the retries; retry after `retry_after_s`."""


class JobFailed(ClientError):
    """A job ended without a result."""

    def __init__(self, job: Job) -> None:
        reason = f": {job.error.message} ({job.error.code})" if job.error else ""
        super().__init__(f"job {job.id} {job.status}{reason}")
        self.job = job


class WaitTimeout(ClientError):
    """A job has not ended in time; it continues."""

    def __init__(self, job: Job, waited_s: float) -> None:
        super().__init__(f"job {job.id} is {job.status} after {waited_s:.0f} s; it continues")
        self.job = job
