"""Routes of webhooks: a tenant's endpoints, their secrets and deliveries."""

import contextlib
from secrets import token_hex
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api import strict_json
from api.context import Context, Services, ServicesDep, Tenant, returns_secret
from api.http.lists import MAX_LIMIT, SCANS, After, Limit, Order, known_parameters
from api.http.middleware import JSON_TYPES, require_type
from api.http.openapi import problems, request_body
from api.jobs.job_object import iso
from api.jobs.request import Body, validated
from api.submission import IdempotencyKey, idempotency, reserved_id
from api.webhook_events import ENDPOINT_EVENTS, EndpointEventName, event_names
from shared.errors import FetchFailed, FetchRefused, InvalidRequest, NotFound
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.queue.tenants.webhooks import DeliveryFilters, WebhookDelivery
from shared.runtime.clock import new_id, now_ms
from shared.webhooks import (
    TERMINAL_EVENTS,
    DeliveryState,
    SigningSecret,
    WebhookEndpoint,
    new_secret,
    rotate_secrets,
)

router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"])


ExpiresS = Annotated[int, Field(strict=True, ge=60, le=30 * 86_400)]


class EndpointRequest(BaseModel):
    """The body of `POST /v1/webhooks`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[
        str,
        Field(
            max_length=2048, description="https, and reachable from the workers.", examples=["https://example.com/hook"]
        ),
    ]
    events: Annotated[
        tuple[EndpointEventName, ...], Field(min_length=1, description="Unset: those that end a job.")
    ] = TERMINAL_EVENTS
    description: Annotated[str, Field(max_length=200)] = ""
    expires_s: Annotated[
        ExpiresS | None, Field(description="Delete it after this many seconds, unless a change sets others.")
    ] = None


class EndpointChange(BaseModel):
    """The body of `PATCH /v1/webhooks/{id}`: only the fields sent change. Enabling clears past failures."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[str | None, Field(max_length=2048, examples=["https://example.com/hook"])] = None
    events: Annotated[tuple[EndpointEventName, ...] | None, Field(min_length=1)] = None
    description: Annotated[str | None, Field(max_length=200)] = None
    enabled: Annotated[bool | None, Field(strict=True)] = None
    expires_s: Annotated[ExpiresS | None, Field(description="Delete it after this many seconds from now.")] = None


class EndpointObject(BaseModel):
    """An endpoint; `secret` is returned only when it is created or rotated."""

    id: str
    object: Literal["webhook"] = "webhook"
    url: str
    events: list[str]
    description: str
    enabled: bool
    disabled_reason: str | None
    failing_since: str | None
    created_at: str
    expires_at: str | None = Field(description="When it is deleted; null: never.")
    secret: str | None = None


class EndpointList(BaseModel):
    object: Literal["list"] = "list"
    data: list[EndpointObject]


class SecretObject(BaseModel):
    """The secret that signs deliveries to the URLs in the `webhook` of jobs."""

    object: Literal["webhook_secret"] = "webhook_secret"
    secret: str
    previous_until: str | None = Field(description="The previous secret signs too until then.")


class AttemptObject(BaseModel):
    at: str
    status: int | None
    error: str | None
    duration_ms: int


class DeliveryObject(BaseModel):
    """The delivery of an event to a URL; receivers see `webhook_id`, the same in every attempt."""

    id: str
    object: Literal["webhook_delivery"] = "webhook_delivery"
    webhook_id: str
    type: str
    job_id: str | None
    url: str
    state: Literal["pending", "delivered", "failed"]
    attempts: int
    next_attempt_at: str | None
    log: list[AttemptObject]


class DeliveryListQuery(BaseModel):
    """Filters and paging of the deliveries."""

    endpoint: str | None = Field(None, max_length=64, description="Only deliveries to this endpoint.")
    state: DeliveryState | None = Field(None, description="Only deliveries in this state.")
    after: After = None
    limit: Limit = 20
    order: Order = "desc"


class DeliveryList(BaseModel):
    """A page of deliveries; `after=next_cursor` returns the next one.

    A filtered page can be short or empty while `has_more` is true: each request reads a bounded number of deliveries.
    """

    object: Literal["list"] = "list"
    data: list[DeliveryObject]
    has_more: bool
    next_cursor: str | None


_CREATION = request_body("application/json", {"schema": EndpointRequest.model_json_schema()})
_CHANGE = request_body("application/json", {"schema": EndpointChange.model_json_schema()})


@router.post(
    "",
    status_code=201,
    openapi_extra=_CREATION,
    responses=problems(400, 409, 415, 422, 503) | {201: {"model": EndpointObject}},
)
async def create_webhook(
    request: Request, response: Response, context: Context, key: IdempotencyKey = None
) -> EndpointObject:
    """Create an endpoint; only this response contains its secret."""
    body, tenant, services = await _body(request, EndpointRequest), context.tenant, context.services
    await _check_url(body.url, tenant, services)
    endpoint_id = await reserved_id(idempotency(key, await request.body()), f"we_{token_hex(8)}", context)
    if key is not None:
        with contextlib.suppress(NotFound):  # not created before
            earlier = await services.queue.webhooks.endpoint(tenant, endpoint_id)
            response.headers["Idempotent-Replayed"] = "true"
            return _endpoint(earlier, show_secret=True)
    endpoint = WebhookEndpoint(
        id=endpoint_id,
        url=body.url,
        states=_states(body.events),
        secrets=(SigningSecret(secret=new_secret()),),
        description=body.description,
        created_at_ms=now_ms(),
        expires_at_ms=_expires_at_ms(body.expires_s),
    )
    stored = await services.queue.webhooks.create_endpoint(tenant, endpoint)
    if stored != endpoint:
        response.headers["Idempotent-Replayed"] = "true"
    return _endpoint(stored, show_secret=True)


@router.get("", responses=problems(422, 503), dependencies=[known_parameters()])
async def list_webhooks(tenant: Tenant, services: ServicesDep) -> EndpointList:
    """List the endpoints, oldest first."""
    return EndpointList(data=[_endpoint(endpoint) for endpoint in await services.queue.webhooks.endpoints(tenant)])


@router.get("/secret", responses=problems(503))
@returns_secret
async def get_job_webhook_secret(tenant: Tenant, services: ServicesDep) -> SecretObject:
    """Return the secret that signs deliveries to the URLs of jobs; needs a key with the scope `jobs:write`."""
    return _secret(await services.queue.webhooks.account_secrets(tenant))


@router.post("/secret/rotate", responses=problems(503))
async def rotate_job_webhook_secret(tenant: Tenant, services: ServicesDep) -> SecretObject:
    """Replace that secret; the previous one signs too for a day."""
    return _secret(await services.queue.webhooks.rotate_account_secrets(tenant))


@router.get(
    "/deliveries",
    responses=problems(422, 503),
    dependencies=[known_parameters("endpoint", "state", "after", "limit", "order")],
)
async def list_webhook_deliveries(
    tenant: Tenant,
    services: ServicesDep,
    query: Annotated[DeliveryListQuery, Query()],
) -> DeliveryList:
    """List deliveries of the last seven days with each attempt, by default newest first."""
    filters = DeliveryFilters(query.endpoint, query.state, query.order == "desc")
    async with SCANS.turn(tenant, 1) if filters.select else contextlib.nullcontext():
        deliveries, cursor = await services.queue.webhooks.deliveries(
            tenant, filters, after=query.after, limit=min(query.limit, MAX_LIMIT)
        )
    return DeliveryList(
        data=[_delivery(delivery) for delivery in deliveries], has_more=cursor is not None, next_cursor=cursor
    )


@router.get("/deliveries/{delivery_id}", responses=problems(404, 503))
async def get_webhook_delivery(delivery_id: str, tenant: Tenant, services: ServicesDep) -> DeliveryObject:
    """Read one delivery."""
    return _delivery(await services.queue.webhooks.delivery(tenant, delivery_id))


@router.post(
    "/deliveries/{delivery_id}/redeliver", status_code=202, response_class=Response, responses=problems(404, 503)
)
async def redeliver_webhook(delivery_id: str, tenant: Tenant, services: ServicesDep) -> Response:
    """Deliver again with the same webhook id."""
    await services.queue.webhooks.redeliver(tenant, delivery_id)
    return Response(status_code=202)


@router.get("/{endpoint_id}", responses=problems(404, 503))
async def get_webhook(endpoint_id: str, tenant: Tenant, services: ServicesDep) -> EndpointObject:
    """Read one endpoint."""
    return _endpoint(await services.queue.webhooks.endpoint(tenant, endpoint_id))


@router.patch("/{endpoint_id}", openapi_extra=_CHANGE, responses=problems(400, 404, 415, 422, 503))
async def change_webhook(endpoint_id: str, request: Request, tenant: Tenant, services: ServicesDep) -> EndpointObject:
    """Change an endpoint; `{"enabled": true}` enables one that was disabled."""
    body = await _body(request, EndpointChange)
    if body.url is not None:
        await _check_url(body.url, tenant, services)
    update = body.model_dump(exclude_none=True, exclude={"events", "expires_s"})
    if body.expires_s is not None:
        update["expires_at_ms"] = _expires_at_ms(body.expires_s)
    if body.events is not None:
        update["states"] = _states(body.events)
    if body.enabled:
        update |= {"failing_since": None, "disabled_reason": None}
    webhooks = services.queue.webhooks
    changed = await webhooks.change_endpoint(tenant, endpoint_id, lambda stored: stored.model_copy(update=update))
    return _endpoint(changed)


@router.delete("/{endpoint_id}", status_code=204, responses=problems(404, 503))
async def delete_webhook(endpoint_id: str, tenant: Tenant, services: ServicesDep) -> Response:
    """Delete an endpoint; nothing more is sent to it."""
    await services.queue.webhooks.delete_endpoint(tenant, endpoint_id)
    return Response(status_code=204)


@router.post("/{endpoint_id}/rotate", responses=problems(404, 503))
async def rotate_webhook_secret(endpoint_id: str, tenant: Tenant, services: ServicesDep) -> EndpointObject:
    """Replace the secret and return the new one; for a day deliveries carry signatures of both."""

    def rotated(stored: WebhookEndpoint) -> WebhookEndpoint:
        return stored.model_copy(update={"secrets": rotate_secrets(stored.secrets, now_ms())})

    return _endpoint(await services.queue.webhooks.change_endpoint(tenant, endpoint_id, rotated), show_secret=True)


@router.post("/{endpoint_id}/test", status_code=202, responses=problems(404, 503))
async def test_webhook(endpoint_id: str, tenant: Tenant, services: ServicesDep) -> dict[str, str]:
    """Send a `webhook.test` event and return the id of its delivery."""
    endpoint = await services.queue.webhooks.endpoint(tenant, endpoint_id)
    return {"delivery": await services.queue.webhooks.send_test(tenant, endpoint, new_id("test", now_ms()))}


async def _body(request: Request, model: type[Body]) -> Body:
    require_type(request, JSON_TYPES)
    return validated(model, strict_json.decode(await request.body()))


def _expires_at_ms(expires_s: int | None) -> int | None:
    return None if expires_s is None else now_ms() + 1000 * expires_s


def _states(events: tuple[EndpointEventName, ...]) -> tuple[str, ...]:
    return tuple(ENDPOINT_EVENTS[name] for name in events)


async def _check_url(url: str, tenant: str, services: Services) -> None:
    """Raise `InvalidRequest` for a URL that deliveries cannot reach; each delivery resolves its name again."""
    try:
        await FetchGuard(FetchRules.for_webhooks(services.settings), tenant=tenant).resolve_url(url)
    except (FetchRefused, FetchFailed) as error:
        raise InvalidRequest(f"url: {error.message}", param="url") from error


def _endpoint(endpoint: WebhookEndpoint, *, show_secret: bool = False) -> EndpointObject:
    failing = endpoint.failing_since
    return EndpointObject(
        **endpoint.model_dump(include={"id", "url", "description", "enabled", "disabled_reason"}),
        events=event_names(endpoint.states),
        failing_since=None if failing is None else iso(round(failing)),
        created_at=iso(endpoint.created_at_ms) or "",
        expires_at=iso(endpoint.expires_at_ms),
        secret=endpoint.secrets[0].secret if show_secret else None,
    )


def _secret(secrets: tuple[SigningSecret, ...]) -> SecretObject:
    previous_until_ms = secrets[1].until_ms if len(secrets) > 1 else None
    return SecretObject(secret=secrets[0].secret, previous_until=iso(previous_until_ms))


def _delivery(delivery: WebhookDelivery) -> DeliveryObject:
    return DeliveryObject(
        id=delivery.id,
        webhook_id=f"msg_{delivery.event_id}",
        type=delivery.type,
        job_id=delivery.job_id or None,
        url=delivery.url,
        state=delivery.state.value,
        attempts=delivery.attempts,
        next_attempt_at=iso(delivery.next_at_ms),
        log=[
            AttemptObject(at=iso(attempt.at_ms) or "", **attempt.model_dump(exclude={"at_ms"}))
            for attempt in delivery.log
        ],
    )
