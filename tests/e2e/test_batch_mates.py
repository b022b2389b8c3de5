"""Many clients at once: each gets its own picture, and the picture it would have had alone."""

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
from demo.pictures import all_prompts

CLIENTS = 64


def picture(client: httpx.Client, job: dict[str, Any], index: int = 0) -> Image.Image:
    answer = client.get(f"/v1/jobs/{job['id']}/artifacts/{index}")
    assert answer.status_code == 200, answer.text
    return Image.open(io.BytesIO(answer.content)).convert("RGB")


def ask(stack: Any, body: dict[str, Any]) -> tuple[dict[str, Any], Image.Image]:
    """Be one client: submit, wait, fetch."""
    with httpx.Client(base_url=stack.url, timeout=90) as client:
        job = client.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"}).json()
        while job["status"] in ("queued", "running"):
            job = client.get(f"/v1/jobs/{job['id']}", params={"wait": 30}).json()
        assert job["status"] == "succeeded", job["error"]
        return job, picture(client, job)


def requests(count: int) -> list[dict[str, Any]]:
    chance = random.Random(5)
    prompts = [prompt.caption() for prompt in chance.sample(all_prompts(), count)]
    return [
        {"model": "demo", "prompt": prompt, "seed": chance.randrange(10**6), "steps": chance.choice([12, 14, 16])}
        for prompt in prompts
    ]


def test_each_of_64_clients_gets_its_own_picture_as_if_alone(make_stack: Any) -> None:
    """Fused with strangers, each client's picture shows its prompt and equals the lone run's within 2/255."""
    stack = make_stack().start(workers=1)
    worker = stack.parts[-1]
    bodies = requests(CLIENTS)
    with ThreadPoolExecutor(CLIENTS) as clients:
        worker.send(signal.SIGSTOP)  # until all are there: so many clients may take longer than it does
        asked = clients.map(lambda body: ask(stack, body), bodies)
        try:
            wait_until(lambda: len(stack.read("/v1/jobs", limit="100")["data"]) == CLIENTS, "all have asked")
        finally:
            worker.send(signal.SIGCONT)
        together = list(asked)
    assert max(job["batching"]["max_jobs"] for job, _ in together) >= 8, "nothing was fused"
    right = sum(matches(made, body["prompt"]) for (_, made), body in zip(together, bodies, strict=True))
    assert right >= 0.95 * CLIENTS, f"{right} of {CLIENTS} pictures show their prompt"
    for (_, made), body in zip(together, bodies, strict=True):
        job, solo = ask(stack, body)
        assert job["batching"]["max_jobs"] == 1
        assert np.abs(np.asarray(made, int) - np.asarray(solo, int)).max() <= 2, body
