"""A receiver of webhooks on this machine, which hands them on to an application."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from fusequeue import InvalidDelivery, WebhookEvent, webhooks

MAX_BODY_BYTES = 100_000  # the service sends at most 20 kB
MAX_REQUESTS = 16  # at once; the service sends four
READ_TIMEOUT_S = 10.0
FORWARD_TIMEOUT_S = 15.0  # the service waits 20 s for a response


@dataclass(frozen=True)
class Forward:
    """An application's URL, and the secret with which it verifies what it gets."""

    url: str
    secret: str


@dataclass(frozen=True)
class Delivery:
    """A verified delivery; `response` is the status of the application, or why there is none, None: not forwarded."""

    id: str
    event: WebhookEvent
    response: int | str | None = None


def forwarded(forward: Forward, message_id: str, body: bytes) -> int | str:
    """Send a delivery to an application; return the status of its response, or why there is none."""
    headers = {"user-agent": "fusequeue-webhooks/1", **webhooks.sign(body, forward.secret, message_id)}
    try:
        with httpx.stream(
            "POST", forward.url, content=body, headers=headers, timeout=FORWARD_TIMEOUT_S, trust_env=False
        ) as response:
            return response.status_code  # what the application writes is not read
    except httpx.HTTPError as error:
        return f"no response: {error or type(error).__name__}"


class Receiver(ThreadingHTTPServer):
    """Receives deliveries on a port of this machine; 0 is a free one. A response has the status of the application."""

    daemon_threads = True

    def __init__(
        self, port: int, on_delivery: Callable[[Delivery], None], on_refusal: Callable[[InvalidDelivery], None]
    ) -> None:
        self.secrets: Sequence[str] = ()
        self.forward: Forward | None = None
        self._on_delivery = on_delivery
        self._on_refusal = on_refusal
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def receive(self, headers: Mapping[str, str], body: bytes) -> int:
        """Take a delivery, and return the status of the response."""
        try:
            event = self._verified(headers, body)
        except InvalidDelivery as error:
            self._on_refusal(error)
            return 400
        message_id = next(value for name, value in headers.items() if name.lower() == "webhook-id")
        is_test = event.type == "webhook.test"  # of this command itself: the application has not asked for it
        response = None if self.forward is None or is_test else forwarded(self.forward, message_id, body)
        self._on_delivery(Delivery(message_id, event, response))
        if response is None:
            return 204
        return response if isinstance(response, int) else 502

    def _verified(self, headers: Mapping[str, str], body: bytes) -> WebhookEvent:
        """Return the event of a delivery that one of the secrets has signed."""
        refused = InvalidDelivery("nothing is expected yet")
        for secret in self.secrets:
            try:
                return webhooks.verify(body, headers, secret)
            except InvalidDelivery as error:
                refused = error
        raise refused

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a request on its thread, or close it if there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """Say nothing: a connection that breaks is tried again by the service."""


class _Handler(BaseHTTPRequestHandler):
    server: Receiver
    timeout = READ_TIMEOUT_S

    def do_POST(self) -> None:
        length = self.headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 10):
            return self._respond(411)
        if int(length) > MAX_BODY_BYTES:
            return self._respond(413)
        body = self.rfile.read(int(length))
        self._respond(self.server.receive(dict(self.headers.items()), body))

    def _respond(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: the command prints deliveries."""
