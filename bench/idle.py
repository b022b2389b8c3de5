"""`python -m bench.idle`: for how long a GPU thread has nothing to do while jobs wait, pictures going to an S3 server.

Starts an S3 server (moto) and `fusequeue up` with the demo model, at most eight rows, one torch thread. Clients submit
a job, wait for it, fetch its picture from storage and submit the next. The figures are those of the worker's own
`/metrics`, over the steady state. `--json FILE` keeps them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench import record
from bench.clients import REQUEST_TIMEOUT_S, Load, Meter, asking, client
from bench.over_http import ROWS, launched, up
from cli.up.environment import first_free_port

BUCKET = "pictures"
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=bench/20260101/us-east-1/s3/aws4_request"}  # moto asks no more
START_S = 30.0
STEPS = (8, 12, 16)

MODELS_FILE = """
[[model]]
id = "demo"
source = "{source}"
tasks = ["text_to_image"]
max_batch = {rows}

[model.defaults]
width = 64
height = 64
guidance_scale = 2.0

[model.limits]
min_side = 64
max_side = 64
multiple_of = 8
"""


@contextmanager
def s3(folder: Path) -> Iterator[str]:
    """Run an S3 server with an empty bucket, and yield its URL."""
    port = first_free_port("127.0.0.1", 5600, lambda _: None, "s3")
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with launched(command, folder / "s3.log", None):
        give_up = time.monotonic() + START_S
        while True:
            try:
                httpx.put(f"{url}/{BUCKET}", headers=SIGNED, timeout=5).raise_for_status()
                break
            except httpx.TransportError:
                if time.monotonic() > give_up:
                    raise RuntimeError((folder / "s3.log").read_text()[-2000:]) from None
                time.sleep(0.1)
        yield url


def jobs() -> Iterator[dict[str, object]]:
    """Yield jobs without end, their steps mixed."""
    for at in itertools.count():
        prompt = "a red circle on a blue ground, left"
        yield {"model": "demo", "prompt": prompt, "seed": at, "steps": STEPS[at % len(STEPS)]}


async def scrape(port: int) -> dict[str, float]:
    """Return the worker's series by name, summed over their labels."""
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False) as http:
        answer = await http.get(f"http://127.0.0.1:{port}/metrics")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.raise_for_status().text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def measure(url: str, port: int, load: Load) -> dict[str, Any]:
    """Return what the worker's metrics say of a closed loop of clients."""
    async with asking(url) as http:
        meter, line = Meter(load), jobs()
        async with asyncio.TaskGroup() as clients:
            for _ in range(load.clients):
                clients.create_task(client(http, line, meter))
            while not meter.steady:  # noqa: ASYNC110 - a meter is read, it wakes nobody
                await asyncio.sleep(0.01)
            before = await scrape(port)
            while not meter.over:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            after = await scrape(port)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    busy, idle = (grown[f"fusequeue_gpu_{name}_seconds_total"] for name in ("busy", "idle_while_queued"))
    return {
        "gpu_thread_idle_while_work_waits": round(idle / (busy + idle), 5),
        "busy_s": round(busy, 2),
        "pictures_a_second": round(meter.rate, 2),
        "rows_a_forward": round(grown["fusequeue_forward_rows_sum"] / grown["fusequeue_forward_rows_count"], 2),
        "uploads": int(grown["fusequeue_upload_seconds_count"]),
        "upload_ms": round(1000 * grown["fusequeue_upload_seconds_sum"] / grown["fusequeue_upload_seconds_count"], 1),
    }


def main(line: list[str] | None = None) -> None:
    """Measure, tell, and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--pictures", type=int, default=300, help="measured")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(line)
    load = Load(chosen.clients, chosen.pictures)
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch, s3(Path(scratch)) as storage:
        folder = Path(scratch)
        models = folder / "models.toml"
        models.write_text(MODELS_FILE.format(source=record.ROOT / "demo" / "model", rows=ROWS), "utf-8")
        port = first_free_port("127.0.0.1", 9100, lambda _: None, "metrics")
        settings = {"s3_bucket": BUCKET, "s3_endpoint_url": storage, "worker_port": str(port)}
        settings |= {"s3_access_key_id": "bench", "s3_secret_access_key": "bench"}
        with up(folder, "--models", str(models), **settings) as url:
            figures = asyncio.run(measure(url, port, load))
    print(figures, flush=True)
    if chosen.json:
        record.write(chosen.json, figures, clients=load.clients, pictures=load.pictures, rows=ROWS, threads=1)


if __name__ == "__main__":
    main()
