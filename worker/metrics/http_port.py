"""A worker's HTTP port, served on its event loop."""

from contextlib import AbstractAsyncContextManager

from shared.runtime import metrics
from shared.runtime.probe_port import ProbedProcess, probe_port
from worker.worker import Worker


def http_port(host: str, port: int, worker: Worker) -> AbstractAsyncContextManager[None]:
    """Serve the port during the block; raises `ConfigurationError` when it is not free."""

    async def unready() -> str | None:
        return worker.unready()

    async def exposition() -> bytes:
        await worker.refresh_metrics()
        return metrics.exposition()

    return probe_port(host, port, ProbedProcess("worker", unready, exposition))
