"""Exceptions of the client.

ClientError
├── InvalidArgument          nothing was sent
├── Unreachable              no response
├── UnexpectedResponse       a response that is not of this service
├── RefusedError             an error response
│   ├── Unauthorized, NotFound, Invalid, Busy
├── JobFailed                a job ended without a result
├── JobsFailed               some jobs of `map` did
├── WaitTimeout              a job has not ended in time
├── BatchTimeout             a batch has not
└── InvalidDelivery          a webhook is not from the service
"""

from __future__ import annotations

import copyreg
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from fusequeue.response_types import Job


class ClientError(Exception):
    """Base class of this package's exceptions."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to copy the exception, also into another process: its class is called with other arguments."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class InvalidArgument(ClientError, ValueError):
    """An argument or setting of the client is invalid; nothing was sent."""


class Unreachable(ClientError):
    """The service did not respond, also after the retries."""


class UnexpectedResponse(ClientError):
    """The response is not that of a fusequeue service, or of one that is too new for this client."""


@dataclass(frozen=True)
class FieldError:
    """A fault of a request; `field` is None if it concerns no single field."""

    field: str | None
    message: str

    def __str__(self) -> str:
        """Return the message, with the field's name once."""
        if not self.field or re.search(rf"(?<![\w.]){re.escape(self.field)}(?!\w|\.\w)", self.message):
            return self.message
        return f"{self.field}: {self.message}"


class RefusedError(ClientError):
    """The service responded with an error; `errors` are all faults of the request, `message` is the first."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        param: str | None = None,
        request_id: str | None = None,
        errors: tuple[FieldError, ...] = (),
    ) -> None:
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.request_id = request_id
        self.errors = errors or (FieldError(param, message),)
        self.retry_after_s: float | None = None
        super().__init__("; ".join(map(str, self.errors)))

    def rename(self, field: str) -> None:
        """Name the field of the caller instead of the one that was sent."""
        self.message = self.message.removeprefix(f"{self.param}: ")
        self.param, self.errors = field, (FieldError(field, self.message),)
        self.args = (str(self.errors[0]),)


class Unauthorized(RefusedError):
    """401, 403: the API key is missing, unknown, expired, or lacks the scope."""


class NotFound(RefusedError):
    """404: the job, model or image does not exist, or belongs to another tenant."""


class Invalid(RefusedError):
    """400, 413, 415, 422: the request is invalid; `param` names the first field, `errors` all of them."""


class Busy(RefusedError):
    """429, 503: the service is full or unavailable, also after the retries; retry after `retry_after_s`."""


class JobFailed(ClientError):
    """A job ended without a result."""

    def __init__(self, job: Job) -> None:
        reason = f": {FieldError(job.error.param, job.error.message)} ({job.error.code})" if job.error else ""
        super().__init__(f"job {job.id} {job.status}{reason}")
        self.job = job


ItemFailure: TypeAlias = JobFailed | RefusedError | InvalidArgument | OSError
"""Why a prompt of `map` has no result: its job failed, the service refused it, or its image cannot be read."""


class JobsFailed(ClientError):
    """Some prompts of `map` have no result; `failures` has the reasons by their number among the prompts."""

    def __init__(self, failures: Mapping[int, ItemFailure], total: int) -> None:
        number, first = next(iter(failures.items()))
        super().__init__(f"{len(failures)} of {total} jobs failed; number {number}: {first}")
        self.failures = dict(failures)


class InvalidDelivery(ClientError):
    """A delivery of a webhook is not from the service, too old, or no event."""


class WaitTimeout(ClientError):
    """A job has not ended in time; it continues."""

    def __init__(self, job: Job, waited_s: float) -> None:
        super().__init__(f"job {job.id} is {job.status} after {waited_s:g} s; it continues")
        self.job = job
