"""A receiver of webhooks, for tests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from harness.waiting import wait_until


class Receiver:
    """A server that takes down what it is told."""

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
        """Return what was told of these, all being there."""

        def found() -> list[tuple[dict[str, str], str]]:
            return [one for one in list(self.received) if json.loads(one[1])["type"] in types]

        wait_until(lambda: {json.loads(one[1])["type"] for one in found()} == set(types), f"all of {types} are told")
        return found()


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """Give a receiver that listens on a port of its own."""
    made = Receiver()
    serving = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        serving.join()
        made.server.server_close()
