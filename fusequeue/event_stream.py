"""One connection to the event stream of a job."""

import json
from collections.abc import AsyncGenerator

import httpx
from httpx_sse import SSEError, aconnect_sse

from fusequeue.errors import UnexpectedResponse
from fusequeue.response_types import Event, event
from fusequeue.transport import UNAVAILABLE, Transport, refusal, unreachable

STREAM_READ_S = 60.0  # the service sends a line on a stream of events at least every 15 s


async def read_events(http: Transport, path: str, last_id: str, timeout_s: float) -> AsyncGenerator[tuple[str, Event]]:
    """Yield the events after `last_id` with their ids, until the stream ends."""
    headers = {"Last-Event-ID": last_id} if last_id else {}
    timeout = httpx.Timeout(timeout_s, read=max(timeout_s, STREAM_READ_S), pool=None)
    try:
        async with aconnect_sse(http.client, "GET", path, headers=headers, timeout=timeout) as source:
            if source.response.status_code in UNAVAILABLE:
                raise httpx.RemoteProtocolError(f"HTTP status {source.response.status_code}")
            http.responded = True
            if source.response.is_error:
                await source.response.aread()
                raise refusal(source.response)
            if source.response.status_code == httpx.codes.NO_CONTENT:
                return
            async for message in source.aiter_sse():
                if not message.data:
                    continue  # what the parser makes of a keep-alive after an event with an id
                yield message.id, _event(message.data)
    except SSEError as error:
        raise UnexpectedResponse(f"{http.client.base_url}: no event stream at {path}: {error}") from error
    except httpx.TransportError as error:
        raise unreachable(http.client.base_url, error) from error


def _event(text: str) -> Event:
    try:
        data = json.loads(text)
        return event(data if isinstance(data, dict) else {})
    except ValueError as error:  # of pydantic too
        raise UnexpectedResponse(f"an event cannot be read: {error}") from error
