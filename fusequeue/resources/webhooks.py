"""Webhook endpoints of the API key's tenant, and deliveries to them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any

from pydantic import SkipValidation

from fusequeue.arguments import path_of, whole
from fusequeue.job_fields import DeliveryState, EndpointEventName
from fusequeue.response_types import Resource
from fusequeue.transport import Transport

PATH = "/v1/webhooks"


class WebhookEndpoint(Resource):
    """A URL that receives events. `secret` is set only when the endpoint is created or its secret rotated."""

    id: str
    url: str
    events: tuple[SkipValidation[EndpointEventName], ...]
    description: str = ""
    enabled: bool = True
    disabled_reason: str | None = None
    failing_since: datetime | None = None
    created_at: datetime
    expires_at: datetime | None = None
    secret: str | None = None


class WebhookSecret(Resource):
    """The secret of the URLs in the `webhook` of jobs; the previous one signs too until `previous_until`."""

    secret: str
    previous_until: datetime | None = None


class DeliveryAttempt(Resource):
    """One attempt of a delivery: the response's status, or the error."""

    at: datetime
    status: int | None = None
    error: str | None = None
    duration_ms: int


class WebhookDelivery(Resource):
    """The delivery of an event to a URL, with its attempts in `log`."""

    id: str
    webhook_id: str
    type: str
    job_id: str | None = None
    url: str
    state: SkipValidation[DeliveryState]
    attempts: int
    next_attempt_at: datetime | None = None
    log: tuple[DeliveryAttempt, ...] = ()


class _TestSent(Resource):
    delivery: str


class AsyncWebhooks:
    """The webhook endpoints of a service: `client.webhooks`."""

    def __init__(self, http: Transport) -> None:
        self._http = http

    async def create(
        self,
        url: str,
        *,
        events: Sequence[EndpointEventName] | None = None,
        description: str = "",
        expires_s: int | None = None,
    ) -> WebhookEndpoint:
        """Create an endpoint and return it with its secret; `events` defaults to those that end a job.

        After `expires_s` it is deleted, unless an update sets others.
        """
        body: dict[str, Any] = {"url": url, "description": description}
        body |= {} if events is None else {"events": list(events)}
        body |= {} if expires_s is None else {"expires_s": whole("expires_s", expires_s)}
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        return await self._http.read(WebhookEndpoint, "POST", PATH, json=body, headers=headers)

    async def list(self) -> list[WebhookEndpoint]:
        """Return the endpoints, oldest first."""
        return await self._http.listed(WebhookEndpoint, PATH)

    async def get(self, endpoint: WebhookEndpoint | str) -> WebhookEndpoint:
        """Return an endpoint as it is now."""
        return await self._http.read(WebhookEndpoint, "GET", path_of(PATH, endpoint))

    async def update(
        self,
        endpoint: WebhookEndpoint | str,
        *,
        url: str | None = None,
        events: Sequence[EndpointEventName] | None = None,
        description: str | None = None,
        enabled: bool | None = None,
        expires_s: int | None = None,
    ) -> WebhookEndpoint:
        """Change what is given; `enabled=True` enables an endpoint that failures have disabled.

        After `expires_s` from now it is deleted.
        """
        names = None if events is None else [*events]
        values = {"url": url, "events": names, "description": description, "enabled": enabled, "expires_s": expires_s}
        body = {name: value for name, value in values.items() if value is not None}
        return await self._http.read(WebhookEndpoint, "PATCH", path_of(PATH, endpoint), json=body)

    async def delete(self, endpoint: WebhookEndpoint | str) -> None:
        """Delete an endpoint; nothing more is sent to it."""
        await self._http.send("DELETE", path_of(PATH, endpoint), removes=True)

    async def rotate(self, endpoint: WebhookEndpoint | str) -> WebhookEndpoint:
        """Replace the secret and return the endpoint with the new one; for a day both sign.

        It is sent once: a second rotation would end the secret in use.
        """
        return await self._http.read(WebhookEndpoint, "POST", path_of(PATH, endpoint, "/rotate"), once=True)

    async def test(self, endpoint: WebhookEndpoint | str) -> str:
        """Send a `webhook.test` event and return the id of its delivery."""
        return (await self._http.read(_TestSent, "POST", path_of(PATH, endpoint, "/test"))).delivery

    async def secret(self, *, rotate: bool = False) -> WebhookSecret:
        """Return the secret that signs deliveries to the `webhook` of jobs; with `rotate`, a new one, sent once."""
        if rotate:
            return await self._http.read(WebhookSecret, "POST", f"{PATH}/secret/rotate", once=True)
        return await self._http.read(WebhookSecret, "GET", f"{PATH}/secret")

    def deliveries(
        self,
        *,
        endpoint: WebhookEndpoint | str | None = None,
        state: DeliveryState | None = None,
        limit: int | None = None,
    ) -> AsyncGenerator[WebhookDelivery]:
        """Yield deliveries of the last seven days, newest first, up to `limit`."""
        endpoint_id = endpoint if endpoint is None or isinstance(endpoint, str) else endpoint.id
        filters = {"endpoint": endpoint_id, "state": state}
        return self._http.pages(WebhookDelivery, f"{PATH}/deliveries", limit, filters)

    async def delivery(self, delivery: WebhookDelivery | str) -> WebhookDelivery:
        """Return a delivery as it is now."""
        return await self._http.read(WebhookDelivery, "GET", path_of(f"{PATH}/deliveries", delivery))

    async def redeliver(self, delivery: WebhookDelivery | str) -> None:
        """Deliver again, with the same webhook id."""
        await self._http.send("POST", path_of(f"{PATH}/deliveries", delivery, "/redeliver"))
