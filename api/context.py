"""Dependencies of the routes: services, caller, tenant, scopes, and the context of one request."""

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import Depends, Query, Request
from starlette.datastructures import UploadFile

from api.auth import Authenticator, Caller, rate_headers
from api.grouping import Grouped
from api.http.forwarded import PREFIX_KEY
from api.http.middleware import RELEASE_KEY
from api.jobs.input_store import INPUT_ID, InputStore
from api.jobs.job_builder import JobTemplates
from api.jobs.job_object import JobObject, QueueObject, job_object
from api.keyless import READ_METHODS, check_keyless
from api.learned_models import LearnedModels
from api.readiness import Readiness
from api.responses import QueuePositions
from api.waiting import TenantWaiters, Waiters
from shared.auth import JobPart, Rate, Scope, Signer, tenant_name
from shared.config.catalog import Catalog
from shared.config.models_watch import ModelsWatch
from shared.config.settings import Settings
from shared.errors import FusequeueError, NotFound, RateLimited, Unavailable
from shared.job import InputRef, State
from shared.job_record import JobRecord
from shared.queue import Queue, Submission, SubmitResult
from shared.queue.maintenance.actions import Action
from shared.runtime.clock import now_ms
from shared.runtime.shares import SharedPool
from shared.storage import Storage
from shared.storage.output_buckets import OutputBuckets

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

_SECRET_ENDPOINTS: set[Callable[..., Any]] = set()
JOB_ID = re.compile(r"job_[0-9a-hjkmnp-tv-z]{26}")


@dataclass(frozen=True)
class Services:
    """What the routes work with: opened when the API starts, closed when it stops.

    `closing` is set when the API begins to stop; long waits and streams end then.
    """

    settings: Settings
    catalog: Catalog
    models_watch: ModelsWatch
    learned_models: LearnedModels
    queue: Queue
    storage: Storage
    output_buckets: OutputBuckets
    authenticator: Authenticator
    queue_positions: QueuePositions
    job_templates: JobTemplates
    submits: Grouped[Submission, SubmitResult | FusequeueError]
    waiters: Waiters
    requests: SharedPool
    responses: SharedPool
    readiness: Readiness
    closing: asyncio.Event


async def services(request: Request) -> Services:
    """Return the services of the app that serves `request`."""
    opened: Services = request.app.state.services
    return opened


ServicesDep = Annotated[Services, Depends(services)]


async def caller(request: Request, services: ServicesDep) -> Caller:
    """Return the caller and count the request; raises `Unauthenticated`, `RateLimited` or, without keys, another."""
    authenticated = await services.authenticator.caller(request.headers.getlist("authorization"), _address(request))
    if not authenticated.has_key:
        check_keyless(request.scope, services.settings)
    request.scope["tenant"] = authenticated.tenant  # for the share of its body
    if authenticated.has_key:
        _count_in_flight(request, services.requests, authenticated.tenant)
    rate = await services.authenticator.count_request(authenticated)
    if rate is not None:
        request.scope["rate_headers"] = rate_headers(rate)
    _check_rate(rate)
    return authenticated


def _count_in_flight(request: Request, requests: SharedPool, tenant: str) -> None:
    """Count a request for its tenant until its end; raises `Overloaded` without a place.

    Behind a proxy all clients have one address, and the limit of connections per address does not apply.
    """
    if not requests.take(tenant, 1):
        raise requests.refusal("too many requests of this tenant are in flight at this process")
    request.scope.setdefault(RELEASE_KEY, []).append(partial(requests.release, tenant, 1))


CallerDep = Annotated[Caller, Depends(caller)]


async def tenant(caller: CallerDep) -> str:
    """Return the tenant of the request."""
    return caller.tenant


Tenant = Annotated[str, Depends(tenant)]


def returns_secret(endpoint: Endpoint) -> Endpoint:
    """Mark a route that returns a signing secret: with it anyone can sign events, so reading jobs is not enough."""
    _SECRET_ENDPOINTS.add(endpoint)
    return endpoint


async def require_jobs_scope(request: Request, caller: CallerDep) -> None:
    """Require the scope to read jobs or, by the method and for secrets, to write them."""
    reads = request.method in READ_METHODS and request.scope["endpoint"] not in _SECRET_ENDPOINTS
    caller.require(Scope.JOBS_READ if reads else Scope.JOBS_WRITE)


async def require_admin_scope(caller: CallerDep) -> None:
    """Require the scope for data that belongs to no tenant."""
    caller.require(Scope.ADMIN)


async def require_metrics_scope(caller: CallerDep) -> None:
    """Require the scope for figures of the service, which Prometheus and autoscalers read."""
    caller.require(Scope.METRICS, Scope.ADMIN)


JOBS_SCOPE = Depends(require_jobs_scope)
ADMIN_SCOPE = Depends(require_admin_scope)
METRICS_SCOPE = Depends(require_metrics_scope)


@dataclass(frozen=True)
class RequestContext:
    """Tenant, base URL and services of one request.

    `base_url` is `scheme://host[:port][/path]` without a trailing slash: the configured one, else the one the client
    used. Forwarded headers count only from trusted proxies (`ForwardedHeaders` applies them).
    """

    tenant: str
    base_url: str
    services: Services
    signer: Signer | None
    url_expires_s: int | None = None
    """When the signed URL of the request expires; None for a request with a key, or without keys."""

    @property
    def waiters(self) -> TenantWaiters:
        """The waiters of the tenant."""
        return self.services.waiters.of(None if self.signer is None else self.tenant)

    async def find_job(self, job_id: str) -> JobRecord:
        """Return the tenant's job, or raise `NotFound`."""
        record = await self.services.queue.jobs.get(job_id) if JOB_ID.fullmatch(job_id) else None
        if record is None or record.job.tenant != self.tenant:
            raise _no_job(job_id)
        return record

    async def job_object(self, record: JobRecord) -> JobObject:
        """Return the job as the client reads it."""
        return job_object(record, self.base_url, await self.queue_position(record), sign=self.sign)

    async def queue_position(self, record: JobRecord) -> QueueObject | None:
        """Return the position of a queued job and why it waits; None while it is paused or cannot be read."""
        if record.state is State.QUEUED and record.paused_at_ms is None:
            with contextlib.suppress(Unavailable):
                return await self.services.queue_positions.of(record.job.id, record.job.model, waits=record.waits)
        return None

    async def store_upload(self, file: UploadFile, param: str) -> InputRef:
        """Validate and store an uploaded image; raises `InputRejected` that names `param`."""
        return await self._inputs.put_upload(file.read, file.size or 0, param)

    async def store_as(self, input_id: str, data: bytes, param: str) -> InputRef:
        """Validate and store an image under an id that was given out before; raises `InputRejected`."""

        async def read() -> bytes:
            return data

        return await self._inputs.put_upload(read, len(data), param, input_id)

    @property
    def _inputs(self) -> InputStore:
        services = self.services
        return InputStore(self.tenant, services.queue, services.storage, services.settings)

    def sign(self, job_id: str, part: JobPart) -> str:
        """Return the query that lets a part of a job be read without a key; "" where no keys are required."""
        return "" if self.signer is None else self.signer.query(job_id, part, now_ms())

    def sign_upload(self, input_id: str) -> str:
        """Return the query that lets the input be uploaded without a key; "" where no keys are required."""
        if self.signer is None:
            return ""
        query = self.signer.query(f"{self.tenant} {input_id}", "upload", now_ms())
        return f"{query}&tenant={quote(self.tenant)}"

    def job_url(self, job_id: str) -> str:
        """Return the URL of a job."""
        return f"{self.base_url}/v1/jobs/{job_id}"


async def request_context(request: Request, caller: CallerDep, services: ServicesDep) -> RequestContext:
    """Return the context of an authenticated request."""
    signer = await services.authenticator.signer() if caller.has_key else None
    return RequestContext(caller.tenant, _base_url(request, services), services, signer)


async def direct_context(request: Request) -> RequestContext:
    """Return the context of a request to a route of jobs that FastAPI does not resolve."""
    opened = await services(request)
    authenticated = await caller(request, opened)
    if request.method in READ_METHODS:
        authenticated.require_for(None, Scope.JOBS_READ)
    else:
        authenticated.require(Scope.JOBS_WRITE)
    return await request_context(request, authenticated, opened)


Expires = Annotated[int | None, Query(description="As in the signed URL.")]
Signature = Annotated[str | None, Query(max_length=128, description="Replaces the key until `expires`.")]


async def artifact_context(
    request: Request,
    job_id: str,
    index: int,
    services: ServicesDep,
    expires: Expires = None,
    signature: Signature = None,
) -> RequestContext:
    """Return the context of a request for an artifact, by key or by signed URL."""
    return await _signed_url_context(request, services, job_id, index, (expires, signature))


async def events_context(
    request: Request, job_id: str, services: ServicesDep, expires: Expires = None, signature: Signature = None
) -> RequestContext:
    """Return the context of a request for the events of a job, by key or by signed URL."""
    return await _signed_url_context(request, services, job_id, "events", (expires, signature))


async def _signed_url_context(
    request: Request, services: Services, job_id: str, part: JobPart, signed: tuple[int | None, str | None]
) -> RequestContext:
    expires, signature = signed
    if signature is None:
        authenticated = await caller(request, services)
        authenticated.require(Scope.JOBS_READ)
        return await request_context(request, authenticated, services)
    signer = await services.authenticator.signer()
    signer.check(job_id, part, expires=expires or 0, signature=signature, now_ms=now_ms())
    async with services.authenticator.unknown_caller(_address(request)):
        record = await services.queue.jobs.get(job_id)
    if record is None:
        raise _no_job(job_id)
    return await _context_by_url(request, services, record.job.tenant, expires)


async def upload_context(
    request: Request,
    services: ServicesDep,
    input_id: str,
    tenant: Annotated[str | None, Query(max_length=64, description="As in the upload URL.")] = None,
    expires: Expires = None,
    signature: Signature = None,
) -> RequestContext:
    """Return the context of an upload of an input under a given id, by key or by signed URL."""
    if signature is None:
        authenticated = await caller(request, services)
        authenticated.require(Scope.JOBS_WRITE)
        if not INPUT_ID.fullmatch(input_id):
            raise NotFound(
                "there is no such upload; POST /compat/fal/storage/upload/initiate begins one", param="input_id"
            )
        return await request_context(request, authenticated, services)
    signer = await services.authenticator.signer()
    signer.check(f"{tenant} {input_id}", "upload", expires=expires or 0, signature=signature, now_ms=now_ms())
    return await _context_by_url(request, services, tenant or "", expires)


async def _context_by_url(request: Request, services: Services, tenant: str, expires: int | None) -> RequestContext:
    """Return the context of a request by a signed URL, which counts for its tenant."""
    request.scope["tenant"] = tenant
    _count_in_flight(request, services.requests, tenant)
    # Without headers about the rate: the URL's holder need not be the tenant.
    _check_rate(await services.authenticator.count_request(await services.authenticator.caller_by_url(tenant)))
    signer = await services.authenticator.signer()
    return RequestContext(tenant, _base_url(request, services), services, signer, url_expires_s=expires)


@dataclass(frozen=True, kw_only=True)
class ChangeContext(RequestContext):
    """The context of a change of jobs: the caller's own, or those of a tenant that an operator names."""

    key_id: str
    by_operator: bool

    async def log(self, action: str, target: str, count: int = 1, detail: str = "") -> None:
        """Add a change that an operator has made to the action log."""
        if self.by_operator:
            await self.services.queue.actions.record(Action(action, target, self.key_id, count, detail))


OF_TENANT = "Whose jobs; for keys with the scope `admin`. By default the key's own tenant."
OfTenant = Annotated[str | None, Query(max_length=64, description=OF_TENANT)]


async def read_context(
    request: Request, caller: CallerDep, services: ServicesDep, tenant: OfTenant = None
) -> RequestContext:
    """Return the context of a read of jobs, which needs the scope to read jobs, or `admin` with a tenant's name."""
    caller.require_for(tenant, Scope.JOBS_READ)
    own = await request_context(request, caller, services)
    return own if tenant is None else replace(own, tenant=tenant_name(tenant))


async def list_context(request: Request, caller: CallerDep, services: ServicesDep) -> RequestContext:
    """Return the context of a list of jobs, of whose filters `tenant` is one."""
    return await read_context(request, caller, services, request.query_params.get("tenant"))


async def change_context(
    request: Request, caller: CallerDep, services: ServicesDep, tenant: OfTenant = None
) -> ChangeContext:
    """Return the context of a change of jobs, which needs the scope to write jobs, or `admin` with a tenant's name."""
    caller.require_for(tenant, Scope.JOBS_WRITE)
    own = await request_context(request, caller, services)
    named = own.tenant if tenant is None else tenant_name(tenant)
    return ChangeContext(
        named,
        own.base_url,
        services,
        own.signer,
        key_id=caller.key_id or "",
        by_operator=tenant is not None,
    )


async def matching_context(request: Request, caller: CallerDep, services: ServicesDep) -> ChangeContext:
    """Return the context of a change of all jobs that match filters, of which `tenant` is one."""
    return await change_context(request, caller, services, request.query_params.get("tenant"))


Context = Annotated[RequestContext, Depends(request_context)]
ReadContext = Annotated[RequestContext, Depends(read_context)]
ListContext = Annotated[RequestContext, Depends(list_context)]
JobContext = Annotated[ChangeContext, Depends(change_context)]
MatchingContext = Annotated[ChangeContext, Depends(matching_context)]
ArtifactContext = Annotated[RequestContext, Depends(artifact_context)]
UploadContext = Annotated[RequestContext, Depends(upload_context)]
EventsContext = Annotated[RequestContext, Depends(events_context)]


def _check_rate(rate: Rate | None) -> None:
    if rate is not None and not rate.allowed:
        raise RateLimited(f"more than {rate.limit} requests in a minute", retry_after_ms=rate.retry_ms)


def _no_job(job_id: str) -> NotFound:
    return NotFound(f"there is no job {job_id[:64]}, or it has been deleted", param="id")


def _address(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _base_url(request: Request, services: Services) -> str:
    scope = request.scope
    root_path = scope.get("app_root_path", scope.get("root_path", ""))
    requested = scope["scheme"], scope.get("server"), root_path, request.headers.get("host")
    if services.settings.public_url is not None:
        return services.settings.public_url.rstrip("/")
    return _requested_url(*requested) + str(scope.get(PREFIX_KEY, ""))


@lru_cache(maxsize=256)
def _requested_url(scheme: str, server: tuple[str, int] | None, root_path: str, host: str | None) -> str:
    """Return the base URL of a request; clients use few, and building one takes 20 us."""
    headers = [] if host is None else [(b"host", host.encode("latin-1"))]
    scope = {"type": "http", "scheme": scheme, "server": server, "path": "/", "root_path": root_path}
    return str(Request({**scope, "query_string": b"", "headers": headers}).base_url).rstrip("/")
