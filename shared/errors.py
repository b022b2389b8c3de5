"""Every error that fusequeue raises on purpose.

FusequeueError
├── InvalidRequest            the caller's input is at fault; `param` names the field
│   ├── InvalidJson
│   ├── UnknownModel
│   ├── InputRejected         an image that cannot be read, is too large, or may not be fetched
│   ├── FetchRefused          a URL that we do not call
│   ├── FetchFailed           a URL that gave no usable answer
│   └── PayloadTooLarge
├── Unauthenticated           no API key, or none that is good
│   ├── InvalidApiKey
│   └── ExpiredApiKey
├── PermissionDenied          the key lacks a scope; the message names it
├── HostRefused               without keys, a request that was meant for another host
├── UrlRefused                a signed URL that was changed or is too old
├── NotFound                  no such job, artifact or input for this tenant
├── Conflict                  the job's state does not allow this
│   └── IdempotencyMismatch   the same Idempotency-Key came with another body
├── QueueFull                 carries `retry_after_s`
├── RateLimited               the tenant asks too often; carries `retry_after_ms`
├── Unavailable               something outside does not answer; trying again may help
│   ├── RedisUnavailable
│   └── StorageUnavailable
├── IncompatibleRedis         an eviction policy or schema version that would lose jobs
├── ConfigurationError        models.toml, rules or settings; the message says what to change
├── LeaseLost                 the job belongs to somebody else by now; write nothing
└── JobError                  a job fails: what its client is told
    ├── ModelUnavailable      weights are missing or do not fit
    ├── AdapterUnavailable    the same, of a LoRA adapter
    ├── InferenceFailed
    ├── NonFiniteLatents
    ├── OutOfMemory           even one row alone does not fit
    └── DeadlineExceeded

`code` is stable and machine-readable; `retryable` says whether the same call may succeed later.
The HTTP status of each is in `api/errors.py`.
"""

from __future__ import annotations

from typing import ClassVar


class FusequeueError(Exception):
    """Base of all: a message for people, a `code` for programs."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(FusequeueError):
    code = "invalid_request"


class InvalidJson(InvalidRequest):
    code = "invalid_json"


class UnknownModel(InvalidRequest):
    code = "model_not_found"


class InputRejected(InvalidRequest):
    code = "invalid_input_image"


class FetchRefused(InvalidRequest):
    code = "url_not_allowed"


class FetchFailed(InvalidRequest):
    code = "url_not_fetched"
    retryable = True


class PayloadTooLarge(InvalidRequest):
    code = "payload_too_large"


class Unauthenticated(FusequeueError):
    code = "missing_api_key"


class InvalidApiKey(Unauthenticated):
    code = "invalid_api_key"


class ExpiredApiKey(Unauthenticated):
    code = "expired_api_key"


class PermissionDenied(FusequeueError):
    code = "permission_denied"


class HostRefused(FusequeueError):
    code = "host_not_allowed"


class UrlRefused(FusequeueError):
    code = "invalid_signature"


class NotFound(FusequeueError):
    code = "not_found"


class Conflict(FusequeueError):
    code = "conflict"


class IdempotencyMismatch(Conflict):
    code = "idempotency_key_reused"


class QueueFull(FusequeueError):
    """The queue takes no more for now; `retry_after_s` estimates when it will."""

    code = "queue_full"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: int, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class RateLimited(FusequeueError):
    """The tenant has used its requests up; `retry_after_ms` says when one more is allowed."""

    code = "rate_limit_exceeded"
    retryable = True

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class Unavailable(FusequeueError):
    code = "unavailable"
    retryable = True


class RedisUnavailable(Unavailable):
    code = "redis_unavailable"


class StorageUnavailable(Unavailable):
    code = "storage_unavailable"


class IncompatibleRedis(FusequeueError):
    code = "incompatible_redis"


class ConfigurationError(FusequeueError):
    code = "configuration_error"


class LeaseLost(FusequeueError):
    code = "lease_lost"


class JobError(FusequeueError):
    code = "job_failed"


class ModelUnavailable(JobError):
    code = "model_unavailable"


class AdapterUnavailable(JobError):
    code = "adapter_unavailable"


class InferenceFailed(JobError):
    code = "inference_failed"


class NonFiniteLatents(JobError):
    code = "non_finite_latents"


class OutOfMemory(JobError):
    code = "out_of_memory"
    retryable = True


class DeadlineExceeded(JobError):
    code = "deadline_exceeded"
