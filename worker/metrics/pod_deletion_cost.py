"""Keeps the deletion cost of this worker's own pod in step with how busy it is: a scale-down takes idle ones first."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Protocol

import httpx
import structlog

from shared.config.settings import Settings
from shared.errors import ConfigurationError

log = structlog.get_logger()

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LOOK_EVERY_S = 0.5
# Kubernetes asks not to write it often: every write goes through the API server and to all who watch pods.
WRITE_EVERY_S = 10.0
FAILED_S = 30.0
TIMEOUT_S = 5.0


class Busy(Protocol):
    @property
    def seats_in_use(self) -> int: ...


class DeletionCost:
    """One pod's annotation. `client` reaches the API server; the token, which is renewed, is read for each write."""

    def __init__(self, client: httpx.AsyncClient, namespace: str, pod: str, token: Path) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        self._token = token

    async def keep(self, worker: Busy, *, write_every_s: float = WRITE_EVERY_S) -> None:
        """Write the pictures in the worker's hands as the cost, when they have changed, at most so often; never end."""
        written: int | None = None
        while True:
            cost = worker.seats_in_use
            if cost == written:
                await asyncio.sleep(LOOK_EVERY_S)
                continue
            try:
                await self.write(cost)
            except (httpx.HTTPError, OSError) as error:
                log.warning("deletion_cost_not_written", error=str(error) or type(error).__name__)
                await asyncio.sleep(FAILED_S)
            else:
                written = cost
                await asyncio.sleep(write_every_s)

    async def write(self, cost: int) -> None:
        """Set the annotation; raises `httpx.HTTPError`, and `OSError` where there is no token."""
        token = (await asyncio.to_thread(self._token.read_text, "ascii")).strip()
        answer = await self._client.patch(
            self._path,
            json={"metadata": {"annotations": {ANNOTATION: str(cost)}}},
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"},
        )
        answer.raise_for_status()


@contextlib.asynccontextmanager
async def cost_kept(
    settings: Settings, worker: Busy, environ: Mapping[str, str], account: Path = ACCOUNT
) -> AsyncIterator[None]:
    """Keep the cost of `pod_name` for as long as the block lasts; nothing is done where that is unset.

    Raises `ConfigurationError` where it is set and this is no pod with a service account.
    """
    if settings.pod_name is None:
        yield
        return
    async with httpx.AsyncClient(
        base_url=_api_server(environ), verify=_trust(account), timeout=TIMEOUT_S, trust_env=False
    ) as client:
        cost = DeletionCost(client, settings.pod_namespace, settings.pod_name, account / "token")
        keeping = asyncio.create_task(cost.keep(worker), name="pod-deletion-cost")
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


def _api_server(environ: Mapping[str, str]) -> str:
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigurationError("FUSEQUEUE_POD_NAME is set outside of Kubernetes: KUBERNETES_SERVICE_HOST is missing")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _trust(account: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError as error:
        raise ConfigurationError(
            f"{account / 'ca.crt'}: {error.strerror or error}; FUSEQUEUE_POD_NAME needs automountServiceAccountToken"
        ) from error
