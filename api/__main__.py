"""`python -m api`: one API process."""

import argparse
import asyncio
import gc
import os
import signal
import sys
from functools import partial
from socket import socket
from typing import Any

from shared.runtime.imports import importing

with importing():
    import structlog
    import uvicorn
    import uvloop
    from fastapi import FastAPI
    from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

    from api.app import create_app, preflight
    from api.http.connections import Connections, capacity, open_files
    from api.http.forwarded import ForwardedHeaders
    from api.http.metrics_port import metrics_port
    from api.http.request_limits import ArrivalLimits
    from api.http.server_protocol import ServerProtocol
    from api.keys_required import secured
    from shared.config import settings
    from shared.config.settings import Settings
    from shared.errors import FusequeueError
    from shared.runtime import log, tracing
    from shared.runtime.allocator import return_freed_memory
    from shared.runtime.log import announce

DRAIN_S = 20
BACKLOG = 1024
FULL_COLLECTION_AFTER = 200  # collections of younger objects, each after 7,000 new ones; the default is 10


class Server(uvicorn.Server):
    """Queues many new connections, and ends the event streams before it waits for the connections to close."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self.app = app

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in (listener for server in self.servers for listener in server.sockets):
            # The kernel can queue more than asyncio accepts at once.
            with socket(fileno=os.dup(listener.fileno())) as same:
                same.listen(BACKLOG)
        if self.started:
            announce("api_ready")

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        services = getattr(self.app.state, "services", None)
        if services is not None:
            services.closing.set()
        await super().shutdown(sockets)


def build_server(configured: Settings, *, host: str, port: int, shares_port: bool = False) -> Server:
    """Return a server of the API, with limits on what a client can occupy."""
    app = create_app(configured, shares_port=shares_port)
    proxies = configured.trusted_proxies
    most = capacity(open_files(), configured.max_connections)
    trusted: Any = ProxyHeadersMiddleware(app, proxies or []).trusted_hosts  # type: ignore[arg-type]
    connections = Connections(most.connections, configured.max_connections_per_address, trusted.__contains__)
    limits = ArrivalLimits(idle_s=configured.keep_alive_s, proxy_idle_s=configured.proxy_keep_alive_s)
    config = uvicorn.Config(
        ForwardedHeaders(app, trusted),
        host=host,
        port=port,
        http=partial(ServerProtocol, connections=connections, limits=limits),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # ForwardedHeaders reads them
        # One that took all new connections of a shared port at once would leave none to the others.
        backlog=1 if shares_port else most.accepted_at_once,
        timeout_graceful_shutdown=DRAIN_S,
    )
    return Server(config, app)


async def serve(server: Server, configured: Settings, listeners: list[socket]) -> None:
    """Serve `listeners`, or the server's own address if there are none, and the port for metrics."""
    async with metrics_port(configured.api_metrics_host, configured.api_metrics_port, server.app):
        await server.serve(listeners or None)


def limit_full_collections() -> None:
    """Let Python search all objects for unused cycles rarely, and never among those of the start.

    Every open stream is about 200 objects, and nothing was found: while 5,000 streams connected, 12 full collections
    stopped the process for 0.3 to 4 s each (on a busy machine), and one more delayed events by 4 s.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_AFTER)


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; configuration errors are logged in one line."""
    return_freed_memory()
    parser = argparse.ArgumentParser(prog="python -m api", description="One API process of fusequeue.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--listener", type=int, action="append", metavar="DESCRIPTOR", help="an inherited socket that listens already"
    )
    parser.add_argument("--insecure-no-keys", action="store_true", help="require no API key, on any address")
    options = parser.parse_args(arguments)
    try:
        configured = settings.load()
        settings.withhold_permissions(configured)
        log.configure(configured.log_level)
        for message in settings.unknown_variables(os.environ):
            structlog.get_logger().warning("setting_unknown", reason=message)
        if options.insecure_no_keys:
            configured = configured.model_copy(update={"auth": "insecure-no-keys"})
        asyncio.run(preflight(configured))
        configured = asyncio.run(secured(configured, options.host))
        tracing.configure(configured.traces, "fusequeue-api")
        listeners = [socket(fileno=descriptor) for descriptor in options.listener or ()]
        server = build_server(configured, host=options.host, port=options.port, shares_port=bool(listeners))
        for number in (signal.SIGTERM, signal.SIGINT):
            # uvicorn raises the signal again after its shutdown: ignored, so that a requested stop exits with 0.
            signal.signal(number, lambda *_: None)
        limit_full_collections()
        uvloop.run(serve(server, configured, listeners))
    except FusequeueError as error:
        structlog.get_logger().error("api_failed", code=error.code, error=error.message)
        return 1
    finally:
        tracing.close()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
