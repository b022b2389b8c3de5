"""Uploaded and fetched adapters on real processes: over HTTP and with the command, by jobs of their tenant."""

from __future__ import annotations

import asyncio
import io
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
import pytest
from harness.waiting import wait_until
from PIL import Image
from tiny.safetensors_file import demo_lora, file_of

from shared.auth import Scope
from shared.config.settings import Settings
from shared.queue import Queue

BODY = {"model": "demo", "prompt": "a red circle on a blue ground, left", "seed": 3, "steps": 4}


class _Files(BaseHTTPRequestHandler):
    """Sends `demo_lora(seed)` at /seed.safetensors."""

    def do_GET(self) -> None:
        body = demo_lora(int(self.path.strip("/").partition(".")[0]), strength=2.0)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    """The URL of a host of adapters."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Files) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def stack(make_shared_stack: Any, files: str) -> Any:
    """A service with keys, whose worker can hold the files and the weights of a few adapters only."""
    fetches = {"adapter_hosts": "127.0.0.1", "fetch_allow_http": "1", "fetch_allow_networks": "127.0.0.0/8"}
    fetches["fetch_ports"] = files.rpartition(":")[2]
    stack = make_shared_stack(adapter_folder_bytes="30000", adapter_memory_bytes="40000", **fetches).start()
    key = create_key(stack, "default")
    stack.client.headers["Authorization"] = f"Bearer {key}"
    stack.env["FUSEQUEUE_API_KEY"] = key
    return stack


def create_key(stack: Any, tenant: str) -> str:
    """Create a key of a tenant, and wait until keys are required."""

    async def create() -> str:
        queue = Queue.connect(Settings(redis_url=stack.env["FUSEQUEUE_REDIS_URL"]))
        try:
            token, _ = await queue.api_keys.create(tenant, frozenset(Scope))
        finally:
            await queue.close()
        return token

    token = asyncio.run(create())
    wait_until(lambda: httpx.get(f"{stack.url}/v1/adapters").status_code == 401, "keys are required")
    return token


def pixels(stack: Any, job: dict[str, Any]) -> np.ndarray:
    response = stack.client.get(f"/v1/jobs/{job['id']}/artifacts/0")
    assert response.status_code == 200, response.text
    return np.asarray(Image.open(io.BytesIO(response.content)).convert("RGB"), np.int16)


def upload(stack: Any, seed: int) -> str:
    files = {"file": (f"{seed}.safetensors", demo_lora(seed, strength=2.0))}
    response = stack.client.post("/v1/adapters", files=files, data={"model": "demo"})
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


def image(stack: Any, *adapter_ids: str) -> np.ndarray:
    job = stack.finish(stack.submit(**BODY, adapters=[{"id": one} for one in adapter_ids]))
    assert job["status"] == "succeeded", job["error"]
    return pixels(stack, job)


def command(stack: Any, *arguments: str) -> list[dict[str, Any]]:
    """Run `fusequeue adapters` and return the objects that it prints."""
    run = [sys.executable, "-m", "cli.main", "adapters", *arguments, "--json", "--url", stack.url]
    done = subprocess.run(run, env=stack.env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_running_worker_uses_uploaded_adapters(stack: Any) -> None:
    """More than it can hold at once: those that were evicted are loaded again, with the same images."""
    plain = image(stack)
    ids = [upload(stack, seed) for seed in range(5)]
    images = [image(stack, one) for one in ids]
    for at, one in enumerate(images):
        assert np.abs(one - plain).max() > 8, "the adapter changes the image"
        assert all(np.abs(one - other).max() > 8 for other in images[:at]), "each in its own way"
    for one, before in zip(ids, images, strict=True):
        assert np.abs(image(stack, one) - before).max() <= 2
    assert np.abs(image(stack) - plain).max() <= 2


def test_a_file_by_url_makes_the_image_of_its_upload(stack: Any, files: str) -> None:
    uploaded = image(stack, upload(stack, 21))
    job = stack.finish(stack.submit(**BODY, adapters=[{"url": f"{files}/21.safetensors"}]))
    assert job["status"] == "succeeded", job["error"]
    assert np.abs(pixels(stack, job) - uploaded).max() <= 2
    (made,) = [one for one in command(stack, "list") if one["source"] is not None]
    assert made["source"] == f"{files}/21.safetensors"


def test_a_file_for_other_layers_is_refused(stack: Any) -> None:
    """The API knows the layers from the worker that has loaded the model."""
    file = {"file": ("a.safetensors", file_of({"unet.conv_in.lora_A.weight": ([1, 5], [0.5] * 5)}))}
    refused = stack.client.post("/v1/adapters", files=file, data={"model": "demo"})
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_adapter")
    assert "has 5 inputs, but the layer of the model has 4" in refused.json()["detail"]


def embedding(seed: int, width: int = 64) -> bytes:
    rng = random.Random(seed)
    return file_of({"emb_params": ([2, width], [rng.gauss(0, 2) for _ in range(2 * width)])})


def test_an_uploaded_embedding_is_used_by_its_tenants_jobs_only(stack: Any) -> None:
    """In a negative prompt here; two of the same word each change their own image."""
    http, body = stack.client, {**BODY, "negative_prompt": "EasyNeg", "guidance_scale": 5.0}
    form = {"model": "demo", "token": "EasyNeg"}
    ids = [
        http.post("/v1/adapters", files={"file": ("a.safetensors", embedding(seed))}, data=form).json()["id"]
        for seed in (1, 2)
    ]
    jobs = [stack.submit(**body, adapters=adapters) for adapters in ([], *([{"id": one}] for one in ids))]
    images = [pixels(stack, stack.finish(job)) for job in jobs]
    for at, one in enumerate(images):
        assert all(np.abs(one - other).max() > 8 for other in images[:at])
    other = {"Authorization": f"Bearer {create_key(stack, 'another')}"}
    refused = http.post("/v1/jobs", json={**body, "adapters": [{"id": ids[0]}]}, headers=other)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, "adapters.0.id")
    wide = http.post("/v1/adapters", files={"file": ("a.safetensors", embedding(1, 768))}, data=form)
    assert (wide.status_code, wide.json()["code"]) == (422, "invalid_adapter")
    assert "text_encoder of the model takes 64" in wide.json()["detail"]


def test_the_command_uploads_lists_and_deletes(stack: Any, tmp_path: Path) -> None:
    file = tmp_path / "ink.safetensors"
    file.write_bytes(demo_lora(7))
    (made,) = command(stack, "create", str(file), "--scale", "0.5")
    assert (made["name"], made["scale"]) == ("ink.safetensors", 0.5)
    assert made in command(stack, "list")
    assert command(stack, "show", made["id"]) == [made]
    image(stack, made["id"])
    assert command(stack, "delete", made["id"]) == [{"id": made["id"], "deleted": True}]
    assert stack.client.get(f"/v1/adapters/{made['id']}").status_code == 404


def test_a_damaged_object_fails_only_its_job(stack: Any) -> None:
    """Its batch mate is not affected, and the error names the field."""
    bad, good = upload(stack, 11), upload(stack, 12)
    for part in (stack.folder / "storage" / "adapters" / "default" / bad).iterdir():
        part.write_bytes(part.read_bytes()[:-100] + bytes(100))
    jobs = [stack.submit(**BODY, adapters=[{"id": one}]) for one in (bad, good)]
    failed, succeeded = [stack.finish(job) for job in jobs]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "adapter_unavailable")
    assert failed["error"]["param"] == "adapters"
    assert succeeded["status"] == "succeeded"


def test_a_job_of_another_tenant_cannot_use_an_adapter(stack: Any) -> None:
    """Deleted while nothing uses it, it is gone from the storage."""
    owner, other = [{"Authorization": f"Bearer {create_key(stack, tenant)}"} for tenant in ("acme", "other")]
    files, http = {"file": ("a.safetensors", demo_lora(1))}, stack.client
    adapter_id = http.post("/v1/adapters", files=files, data={"model": "demo"}, headers=owner).json()["id"]
    body = {**BODY, "adapters": [{"id": adapter_id}]}
    assert http.post("/v1/jobs", json=body, headers=other).status_code == 422
    assert http.delete(f"/v1/adapters/{adapter_id}", headers=other).status_code == 404
    job = http.post("/v1/jobs", json=body, headers={**owner, "Prefer": "wait=50"}).json()
    assert job["status"] == "succeeded", job
    folder = stack.folder / "storage" / "adapters" / "acme"
    assert folder.exists()
    assert http.delete(f"/v1/adapters/{adapter_id}", headers=owner).status_code == 204
    assert http.post("/v1/jobs", json=body, headers=owner).status_code == 422
    wait_until(lambda: not folder.exists(), "the parts are deleted")
