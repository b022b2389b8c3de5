"""The receiver of `fusequeue webhooks listen`: what it takes, refuses, and hands on."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from harness.ports import free_port

from cli.webhooks.receiver import MAX_BODY_BYTES, MAX_REQUESTS, Delivery, Forward, Receiver
from fusequeue import InvalidDelivery, webhooks
from shared.webhooks import new_secret

BODY = json.dumps({"type": "job.succeeded", "data": {"id": "job_1", "status": "succeeded"}}).encode()
OWN, OTHER, APPLICATION = (new_secret() for _ in range(3))


class Listening:
    """A receiver, and what it has taken and refused."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.refusals: list[InvalidDelivery] = []
        self.receiver = Receiver(0, self.deliveries.append, self.refusals.append)
        self.receiver.secrets = [OWN]

    def post(self, body: bytes = BODY, secret: str = OWN, **headers: str) -> httpx.Response:
        url = f"http://127.0.0.1:{self.receiver.port}/"
        return httpx.post(url, content=body, headers={**webhooks.sign(body, secret, "msg_1"), **headers}, timeout=30)


@pytest.fixture
def listening() -> Iterator[Listening]:
    found = Listening()
    with served(found.receiver):
        yield found


@contextmanager
def served(server: HTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def application() -> Iterator[Callable[[int], tuple[str, list[tuple[dict[str, str], bytes]]]]]:
    """Return what starts an application that responds with a status: its URL, and the requests that it gets."""

    def start(status: int) -> tuple[str, list[tuple[dict[str, str], bytes]]]:
        seen: list[tuple[dict[str, str], bytes]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                seen.append((dict(self.headers.items()), self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        server = HTTPServer(("127.0.0.1", 0), Handler)
        stack.enter_context(served(server))
        return f"http://127.0.0.1:{server.server_address[1]}/hook", seen

    with ExitStack() as stack:
        yield start


def test_a_delivery_is_verified_and_taken(listening: Listening) -> None:
    assert listening.post().status_code == 204
    (delivery,) = listening.deliveries
    assert (delivery.id, delivery.event.type, delivery.event.data["id"]) == ("msg_1", "job.succeeded", "job_1")
    assert delivery.response is None


def test_what_another_secret_has_signed_is_refused(listening: Listening) -> None:
    assert listening.post(secret=OTHER).status_code == 400
    assert not listening.deliveries
    assert "signature" in str(listening.refusals[0])


def test_a_body_without_a_length_or_that_is_too_large_is_not_read(listening: Listening) -> None:
    address = ("127.0.0.1", listening.receiver.port)
    for headers, status in (
        (f"Content-Length: {MAX_BODY_BYTES + 1}", b"413"),
        ("Content-Length: -1", b"411"),
        ("A: b", b"411"),
    ):
        with socket.create_connection(address, timeout=30) as connection:
            connection.sendall(f"POST / HTTP/1.1\r\nHost: a\r\n{headers}\r\n\r\n".encode())
            assert connection.recv(1000).split()[1] == status
    assert not listening.deliveries


def test_more_requests_than_it_handles_at_once_are_closed(listening: Listening) -> None:
    address = ("127.0.0.1", listening.receiver.port)
    slow = [socket.create_connection(address, timeout=30) for _ in range(MAX_REQUESTS)]
    for one in slow:
        one.sendall(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n")
    with socket.create_connection(address, timeout=30) as one_more:
        assert one_more.recv(1000) == b""
    for one in slow:
        one.close()


@pytest.mark.parametrize("status", [204, 410, 500])
def test_the_application_gets_the_event_signed_and_its_status_is_the_response(
    listening: Listening, application: Callable[[int], Any], status: int
) -> None:
    url, seen = application(status)
    listening.receiver.forward = Forward(url, APPLICATION)
    assert listening.post().status_code == status
    ((headers, body),) = seen
    assert webhooks.verify(body, headers, APPLICATION) == listening.deliveries[0].event
    assert (body, listening.deliveries[0].response) == (BODY, status)
    assert {name.lower(): value for name, value in headers.items()}["webhook-id"] == "msg_1"


def test_an_application_that_does_not_run_is_a_bad_gateway(listening: Listening) -> None:
    listening.receiver.forward = Forward(f"http://127.0.0.1:{free_port()}/hook", APPLICATION)
    assert listening.post().status_code == 502
    assert "no response" in str(listening.deliveries[0].response)


def test_the_test_event_is_not_forwarded(listening: Listening) -> None:
    listening.receiver.forward = Forward(f"http://127.0.0.1:{free_port()}/hook", APPLICATION)
    assert listening.post(json.dumps({"type": "webhook.test", "data": {}}).encode()).status_code == 204
