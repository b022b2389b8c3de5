"""How long the next byte of a body may take."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from api.errors import RequestTimeout
from api.http import middleware
from api.http.middleware import BodyCaps, BodyLimits


@pytest.mark.parametrize("received", [0, 1])
async def test_a_body_that_stalls_ends_its_request(monkeypatch: pytest.MonkeyPatch, received: int) -> None:
    """Also after some of it: the server's own limit grows with the bytes received."""
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.05)
    pieces = [json.dumps({}).encode()] * received

    async def receive() -> Any:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(), "more_body": True}
        return await asyncio.Event().wait()

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        while True:
            await receive()

    limits = BodyLimits(app, caps=BodyCaps(1000, {}))
    scope = {"type": "http", "path": "/v1/jobs", "headers": []}
    with pytest.raises(RequestTimeout, match="no byte of the body arrived"):
        async with asyncio.timeout(20):
            await limits(scope, receive, None)  # type: ignore[arg-type]


async def test_the_wait_for_the_clients_disconnect_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that waits for its job asks for it after the body."""
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.01)
    messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.sleep(0.1)
        return {"type": "http.disconnect"}

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"

    scope = {"type": "http", "path": "/v1/jobs", "headers": []}
    await BodyLimits(app, caps=BodyCaps(1000, {}))(scope, receive, None)  # type: ignore[arg-type]
