"""Errors that fusequeue raises. `code` is stable; `retryable`: the same call can succeed later.

FusequeueError
├── InvalidRequest            invalid input; `param` names the field, `faults` are all of the same body
│   ├── InvalidJson
│   ├── UnknownModel
│   ├── InputRejected         an image that is unreadable, too large, or not allowed
│   │   └── InputNotFetched    an image at a URL whose host does not respond, or is busy
│   ├── AdapterRejected       an uploaded or fetched adapter that is no valid file, or does not fit its model
│   │   └── AdapterNotFetched  an adapter at a URL whose host does not respond, or is busy
│   ├── FetchRefused          a URL that is not allowed
│   ├── FetchFailed           a URL without a usable response
│   │   └── FetchInterrupted   without a complete one, or with one of a host that is busy
│   └── PayloadTooLarge
├── Unauthenticated           no valid API key
│   ├── InvalidApiKey
│   └── ExpiredApiKey
├── PermissionDenied          the key lacks a scope; the message names it
├── HostRefused               without keys, a request for another host or from another machine
├── OriginRefused             without keys, a request of a page of another origin
├── UrlRefused                a signed URL that was changed or has expired
├── NotFound                  no such object for this tenant
├── Conflict                  the state does not allow this
│   └── IdempotencyMismatch   the same Idempotency-Key with another body
├── QueueFull                 has `retry_after_s`
│   └── QuotaExceeded         a tenant keeps or has used as much as it may; `quota` names what
├── RateLimited               has `retry_after_ms`
├── Unavailable               an external service does not respond
│   ├── Overloaded            this process has no room for more of what tenants share
│   ├── RedisUnavailable
│   │   ├── RedisFull         Redis has no memory left for what clients add
│   │   └── ScriptFailed      a script of the queue has a fault, or finds data that it does not understand
│   └── StorageUnavailable
│       └── StorageRefused    a request that storage would refuse again
├── IncompatibleRedis         an eviction policy or schema version that would lose jobs
├── ConfigurationError        invalid models.toml, rules or settings
└── JobError                  a failed job
    ├── ModelUnavailable      weights are missing or do not fit
    │   └── LoadPostponed     the network, a disk or memory failed: the load is repeated, its jobs are released
    ├── AdapterUnavailable    the same for a LoRA adapter
    ├── InferenceFailed
    │   └── UnusableInput     an input image that cannot be decoded, or that the model refuses
    ├── NonFiniteLatents
    ├── EncodingFailed        an output that cannot be written as a file
    ├── UploadFailed          an output that storage refuses, other than in an outage
    ├── OutputRejected        an output that the destination of its job refuses
    ├── OutputNotSent         one that cannot be sent there
    ├── UnexpectedError       a fault of the worker's own code
    └── OutOfMemory           a single row does not fit

`api/errors.py` maps them to HTTP statuses.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

_PATH = re.compile(r"(?<![\w.:/@-])~?(?:/[\w.@+~-]+){2,}/?")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE)
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.])")


def without_places(text: str) -> str:
    """Return a text without folders, URLs and addresses, for clients; of a path its last part stays."""
    text = _ADDRESS.sub("[address]", _URL.sub("[url]", text))
    return _PATH.sub(lambda match: match.group().rstrip("/").rpartition("/")[2], text)


class FusequeueError(Exception):
    """Base class: `message` for operators and logs, `public` for clients, `code` for programs.

    `public` is the message, except where that can name an address, a path, a bucket or a setting.
    """

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    hidden_as: ClassVar[str | None] = None

    def __init_subclass__(
        cls, code: str | None = None, retryable: bool | None = None, hidden_as: str | None = None
    ) -> None:
        cls.code = code or cls.code
        cls.retryable = cls.retryable if retryable is None else retryable
        cls.hidden_as = hidden_as or cls.hidden_as

    def __init__(self, message: str, *, param: str | None = None, public: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.public = public or self.hidden_as or message


class InvalidRequest(FusequeueError, code="invalid_request"):
    """The first fault of a request; `more` are the others of the same body."""

    more: tuple["InvalidRequest", ...] = ()

    @property
    def faults(self) -> tuple["InvalidRequest", ...]:
        """This fault and the others."""
        return (self, *self.more)


MAX_FAULTS = 32
"""Faults that an error carries: a body can have thousands of unknown fields."""


def first_of(faults: Sequence[InvalidRequest]) -> InvalidRequest:
    """Return the first fault, which carries the others."""
    first = faults[0]
    first.more = tuple(faults[1:MAX_FAULTS])
    return first


class Faults:
    """Collects the faults of one body, so that a part with a fault does not hide those of the others."""

    def __init__(self) -> None:
        self.found: list[InvalidRequest] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the faults of an `InvalidRequest` that the block raises, and go on after it."""
        try:
            yield
        except InvalidRequest as error:
            self.found += error.faults

    def check(self) -> None:
        """Raise the faults, if any."""
        if self.found:
            raise first_of(self.found)


class InvalidJson(InvalidRequest, code="invalid_json"): ...


class UnknownModel(InvalidRequest, code="model_not_found"): ...


class InputRejected(InvalidRequest, code="invalid_input_image"): ...


class InputNotFetched(InputRejected, code="url_not_fetched", retryable=True): ...


class AdapterRejected(InvalidRequest, code="invalid_adapter"): ...


class AdapterNotFetched(AdapterRejected, code="url_not_fetched", retryable=True): ...


class FetchRefused(InvalidRequest, code="url_not_allowed"): ...


class FetchFailed(InvalidRequest): ...


class FetchInterrupted(FetchFailed): ...


class PayloadTooLarge(InvalidRequest, code="payload_too_large"): ...


class Unauthenticated(FusequeueError, code="missing_api_key"): ...


class InvalidApiKey(Unauthenticated, code="invalid_api_key"): ...


class ExpiredApiKey(Unauthenticated, code="expired_api_key"): ...


class PermissionDenied(FusequeueError, code="permission_denied"): ...


class HostRefused(FusequeueError, code="host_not_allowed"): ...


class OriginRefused(FusequeueError, code="origin_not_allowed"): ...


class UrlRefused(FusequeueError, code="invalid_signature"): ...


class NotFound(FusequeueError, code="not_found"): ...


class Conflict(FusequeueError, code="conflict"): ...


class IdempotencyMismatch(Conflict, code="idempotency_key_reused"): ...


class QueueFull(FusequeueError, code="queue_full", retryable=True):
    """The queue is full; `retry_after_s` estimates when it has room."""

    def __init__(self, message: str, *, retry_after_s: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class QuotaExceeded(QueueFull, code="quota_exceeded", retryable=True):
    """A tenant keeps or has used as much as its `quota` allows, and has to delete something or wait."""

    def __init__(self, message: str, *, quota: str, retry_after_s: int) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.quota = quota


class RateLimited(FusequeueError, code="rate_limit_exceeded", retryable=True):
    """The tenant reached its rate limit; `retry_after_ms` is the time until one more request is allowed."""

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class Unavailable(FusequeueError, code="unavailable", retryable=True): ...


class Overloaded(Unavailable, code="overloaded"): ...


class RedisUnavailable(Unavailable, code="redis_unavailable", hidden_as="redis: cannot be reached"): ...


class RedisFull(RedisUnavailable, code="redis_full", hidden_as="redis: no memory left"): ...


class ScriptFailed(RedisUnavailable, code="internal_error", retryable=False, hidden_as="internal error"): ...


class StorageUnavailable(Unavailable, code="storage_unavailable", hidden_as="storage: cannot be used"): ...


class StorageRefused(StorageUnavailable, retryable=False): ...


class IncompatibleRedis(
    FusequeueError, code="incompatible_redis", hidden_as="redis: its settings or schema do not fit"
): ...


class ConfigurationError(FusequeueError, code="configuration_error", hidden_as="the settings are invalid"): ...


class JobError(FusequeueError, code="job_failed"): ...


class ModelUnavailable(JobError, code="model_unavailable"): ...


class LoadPostponed(ModelUnavailable, retryable=True):
    lacks_memory = False


class AdapterUnavailable(JobError, code="adapter_unavailable"): ...


class InferenceFailed(JobError, code="inference_failed"): ...


class NoSurface(InferenceFailed): ...


class UnusableInput(InferenceFailed, code="invalid_input_image"): ...


class NonFiniteLatents(JobError, code="non_finite_latents"): ...


class EncodingFailed(JobError, code="encoding_failed"): ...


class UploadFailed(JobError, code="upload_failed"): ...


class OutputRejected(JobError, code="output_rejected"): ...


class OutputNotSent(JobError, code="output_not_sent", retryable=True): ...


class UnexpectedError(JobError, code="internal_error"):
    """Wraps an exception of another type."""

    def __init__(self, error: Exception) -> None:
        text = error.public if isinstance(error, FusequeueError) else error
        super().__init__(f"unexpected error in the worker: {type(error).__name__}: {text}"[:300])


class OutOfMemory(JobError, code="out_of_memory", retryable=True): ...
