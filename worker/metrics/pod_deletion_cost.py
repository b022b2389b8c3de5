"""The pod deletion cost of this worker: Kubernetes removes idle workers first, then those with only bulk jobs."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

import httpx
import structlog

from shared.config.settings import Settings
from shared.errors import ConfigurationError
from shared.job import Job
from shared.job_fields import Priority
from shared.runtime.asyncio_tools import cancel_and_wait
from worker.worker import Worker

log = structlog.get_logger()

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CHECK_EVERY_S = 0.5
# Kubernetes advises against frequent updates: each write goes through the API server and to everything watching pods.
WRITE_EVERY_S = 10.0
RETRY_AFTER_S = 30.0
TIMEOUT_S = 5.0
URGENT_COST = 1000  # of an interactive or standard image: above any number of bulk ones


def deletion_cost(jobs: Iterable[Job]) -> int:
    """Return the images of the jobs; bulk jobs cost little: they can be run again within their window."""
    return sum(job.slots * (1 if job.priority is Priority.BULK else URGENT_COST) for job in jobs)


async def keep_current(
    client: httpx.AsyncClient, pod_path: str, token: Path, worker: Worker, write_every_s: float = WRITE_EVERY_S
) -> None:
    """Write the cost of the worker's jobs to the pod's annotation whenever it changes, until canceled.

    The token is read for each write, since Kubernetes renews it.
    """
    written: int | None = None
    while True:
        cost = deletion_cost(worker.jobs)
        if cost == written:
            await asyncio.sleep(CHECK_EVERY_S)
            continue
        try:
            bearer = (await asyncio.to_thread(token.read_text, "ascii")).strip()
            response = await client.patch(
                pod_path,
                json={"metadata": {"annotations": {ANNOTATION: str(cost)}}},
                headers={"Authorization": f"Bearer {bearer}", "Content-Type": "application/merge-patch+json"},
            )
            response.raise_for_status()
        except (httpx.HTTPError, OSError) as error:
            log.warning("deletion_cost_write_failed", error=str(error) or type(error).__name__)
            await asyncio.sleep(RETRY_AFTER_S)
        else:
            written = cost
            await asyncio.sleep(write_every_s)


@contextlib.asynccontextmanager
async def pod_deletion_cost(
    settings: Settings, worker: Worker, environ: Mapping[str, str], account: Path = SERVICE_ACCOUNT
) -> AsyncIterator[None]:
    """Keep the deletion cost of `pod_name`, if set, current during the block.

    Raises `ConfigurationError` outside of a pod with a service account.
    """
    if settings.pod_name is None:
        yield
        return
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigurationError(
            "FUSEQUEUE_POD_NAME is set outside of Kubernetes: KUBERNETES_SERVICE_HOST is missing; unset it"
        )
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    try:
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {account / 'ca.crt'}: {error.strerror or error}; "
            "FUSEQUEUE_POD_NAME needs automountServiceAccountToken"
        ) from error
    async with httpx.AsyncClient(base_url=url, verify=tls, timeout=TIMEOUT_S, trust_env=False) as client:
        path = f"/api/v1/namespaces/{settings.pod_namespace}/pods/{settings.pod_name}"
        keeping = asyncio.create_task(keep_current(client, path, account / "token", worker), name="pod-deletion-cost")
        try:
            yield
        finally:
            await cancel_and_wait((keeping,))
