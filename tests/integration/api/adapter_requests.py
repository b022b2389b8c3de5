"""Requests with adapters by URL, and an API that may fetch from the host of the tests."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

import httpx
from harness.http_server import BODY

ALLOWED: dict[str, Any] = {
    "adapter_hosts": ("127.0.0.1",),
    "fetch_allow_networks": (ip_network("127.0.0.0/8"),),
    "fetch_allow_http": True,
    "fetch_ports": tuple(range(1, 65_536)),
    "max_adapter_bytes": 50_000,
}
INK = "/ink.safetensors"


async def submit(api: httpx.AsyncClient, *adapters: dict[str, Any], **options: Any) -> httpx.Response:
    return await api.post("/v1/jobs", json={**BODY, "adapters": list(adapters)}, **options)


async def adapter_of(response: httpx.Response) -> str:
    assert response.status_code == 202, response.text
    (adapter,) = response.json()["adapters"]
    assert adapter["id"].startswith("adapter_")
    return str(adapter["id"])


async def refusal(api: httpx.AsyncClient, adapter: dict[str, Any]) -> dict[str, Any]:
    response = await submit(api, adapter)
    assert response.status_code == 422, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["param"] == f"adapters.0.{'url' if 'url' in adapter else 'hub'}", error
    assert error["message"].startswith(error["param"]), error
    return error
