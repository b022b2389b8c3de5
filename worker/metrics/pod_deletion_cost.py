"""The pod deletion cost of this worker: its claimed images, so that Kubernetes scales idle workers down first."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import structlog

from shared.config.settings import Settings
from shared.errors import ConfigurationError
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


class DeletionCost:
    """The annotation of one pod. The token is read for each write, since Kubernetes renews it."""

    def __init__(self, client: httpx.AsyncClient, namespace: str, pod: str, token: Path) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        self._token = token

    async def keep_current(self, worker: Worker, *, write_every_s: float = WRITE_EVERY_S) -> None:
        """Write the worker's slots in use whenever they change, at most every `write_every_s`, until canceled."""
        written: int | None = None
        while True:
            cost = worker.slots_in_use
            if cost == written:
                await asyncio.sleep(CHECK_EVERY_S)
                continue
            try:
                await self.write(cost)
            except (httpx.HTTPError, OSError) as error:
                log.warning("deletion_cost_write_failed", error=str(error) or type(error).__name__)
                await asyncio.sleep(RETRY_AFTER_S)
            else:
                written = cost
                await asyncio.sleep(write_every_s)

    async def write(self, cost: int) -> None:
        """Set the annotation; raises `httpx.HTTPError`, or `OSError` when there is no token."""
        token = (await asyncio.to_thread(self._token.read_text, "ascii")).strip()
        response = await self._client.patch(
            self._path,
            json={"metadata": {"annotations": {ANNOTATION: str(cost)}}},
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"},
        )
        response.raise_for_status()


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
        cost = DeletionCost(client, settings.pod_namespace, settings.pod_name, account / "token")
        keeping = asyncio.create_task(cost.keep_current(worker), name="pod-deletion-cost")
        try:
            yield
        finally:
            await cancel_and_wait((keeping,))
