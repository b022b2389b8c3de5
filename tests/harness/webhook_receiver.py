"""HTTP server that records webhooks."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from harness.waiting import wait_until


class WebhookReceiver:
    """Records the headers and body of each request."""

    def __init__(self) -> None:
        self.received: list[tuple[dict[str, str], str]] = []
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"])).decode()
                received.append(({name.lower(): value for name, value in self.headers.items()}, content))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self.server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}/hook"

    def wait_for(self, types: Sequence[str]) -> list[tuple[dict[str, str], str]]:
        """Return the webhooks of these types, after all types have arrived."""

        def matching() -> list[tuple[dict[str, str], str]]:
            return [item for item in list(self.received) if json.loads(item[1])["type"] in types]

        wait_until(lambda: {json.loads(item[1])["type"] for item in matching()} == set(types), f"{types} received")
        return matching()


@contextlib.contextmanager
def receiving() -> Iterator[WebhookReceiver]:
    """Run a receiver on a free port."""
    receiver = WebhookReceiver()
    thread = threading.Thread(target=receiver.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        thread.join()
        receiver.server.server_close()
