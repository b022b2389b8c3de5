"""The port of one API process: where several share the API's port, a request there reaches any of them."""

from contextlib import AbstractAsyncContextManager, nullcontext

from fastapi import FastAPI

from api.context import Services
from api.routes.health import exposition, unreadiness
from shared.runtime import metrics
from shared.runtime.probe_port import ProbedProcess, probe_port


def metrics_port(host: str, port: int | None, api: FastAPI) -> AbstractAsyncContextManager[None]:
    """Serve the port, if there is one, during the block; raises `ConfigurationError` when it is not free."""
    if port is None:
        return nullcontext()

    def services() -> Services | None:
        return getattr(api.state, "services", None)

    async def unready() -> str | None:
        opened = services()
        return "the API is starting" if opened is None else await unreadiness(opened)

    async def current() -> bytes:
        opened = services()
        return metrics.exposition() if opened is None else await exposition(opened)

    return probe_port(host, port, ProbedProcess("api_metrics", unready, current))
