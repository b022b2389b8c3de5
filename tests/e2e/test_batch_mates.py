"""Concurrent clients: each gets the image of its request, the same as without batch mates."""

from __future__ import annotations

import io
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
from harness.waiting import wait_until
from PIL import Image

from demo.checker import matches
from demo.drawings import all_prompts

CLIENTS = 8


def read_image(client: httpx.Client, job: dict[str, Any], index: int = 0) -> Image.Image:
    response = client.get(f"/v1/jobs/{job['id']}/artifacts/{index}")
    assert response.status_code == 200, response.text
    return Image.open(io.BytesIO(response.content)).convert("RGB")


def request_image(stack: Any, body: dict[str, Any]) -> tuple[dict[str, Any], Image.Image]:
    """Submit, wait, fetch, as one client."""
    with httpx.Client(base_url=stack.url, timeout=90) as client:
        job = client.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"}).json()
        while job["status"] in ("queued", "running"):
            job = client.get(f"/v1/jobs/{job['id']}", params={"wait": 30}).json()
        assert job["status"] == "succeeded", job["error"]
        return job, read_image(client, job)


def requests(count: int) -> list[dict[str, Any]]:
    rng = random.Random(5)
    prompts = [prompt.caption() for prompt in rng.sample(all_prompts(), count)]
    return [
        {"model": "demo", "prompt": prompt, "seed": rng.randrange(10**6), "steps": rng.choice([12, 14, 16])}
        for prompt in prompts
    ]


def test_concurrent_clients_get_the_same_images_as_without_batch_mates(make_stack: Any) -> None:
    """Each image shows its prompt; a quarter of them are run solo too, and equal within 2/255."""
    stack = make_stack().start(workers=1)
    worker = stack.processes[-1]
    bodies = requests(CLIENTS)
    with ThreadPoolExecutor(CLIENTS) as clients:
        worker.send(signal.SIGSTOP)  # until all jobs are queued: the worker can be faster than the clients
        images = clients.map(lambda body: request_image(stack, body), bodies)
        try:
            wait_until(lambda: len(stack.read("/v1/jobs", limit="100")["data"]) == CLIENTS, "all jobs are queued")
        finally:
            worker.send(signal.SIGCONT)
        batched = list(images)
    assert max(job["batching"]["max_jobs"] for job, _ in batched) >= CLIENTS // 2, "nothing was fused"
    right = sum(matches(image, body["prompt"]) for (_, image), body in zip(batched, bodies, strict=True))
    assert right >= CLIENTS - 1, f"{right} of {CLIENTS} images show their prompt"
    for (_, image), body in list(zip(batched, bodies, strict=True))[::4]:
        job, solo = request_image(stack, body)
        assert job["batching"]["max_jobs"] == 1
        assert np.abs(np.asarray(image, int) - np.asarray(solo, int)).max() <= 2, body
