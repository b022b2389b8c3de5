"""`python -m bench.idle`: idle time of the GPU thread while jobs are queued, with uploads to an S3 server.

Starts an S3 server (moto) and `fusequeue up` with the demo model, at most eight rows, one torch thread. Clients submit
a job, wait for it, fetch its image from storage and submit the next. The figures are from the worker's `/metrics` over
the steady state. `--json FILE` saves them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.common import record
from bench.common.clients import ClientLoad, Meter, closed_loop, light_client, scrape
from bench.common.service import ROWS, launched, until_answered, up
from cli.up.ports import reserved_port

BUCKET = "images"
SIGNED = {"Authorization": "AWS4-HMAC-SHA256 Credential=bench/20260101/us-east-1/s3/aws4_request"}  # enough for moto
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
    """Run an S3 server with an empty bucket and yield its URL."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p"]
    with reserved_port("127.0.0.1", 5600) as port, launched([*command, str(port)], folder / "s3.log", None):
        url = f"http://127.0.0.1:{port}"
        until_answered(
            lambda: httpx.put(f"{url}/{BUCKET}", headers=SIGNED, timeout=5, trust_env=False), folder / "s3.log"
        )
        yield url


def jobs() -> Iterator[dict[str, object]]:
    """Yield jobs without end, with mixed step counts."""
    for at in itertools.count():
        prompt = "a red circle on a blue ground, left"
        yield {"model": "demo", "prompt": prompt, "seed": at, "steps": STEPS[at % len(STEPS)]}


async def measure(url: str, port: int, load: ClientLoad) -> dict[str, Any]:
    """Run a closed loop of clients and return figures of the worker's metrics."""
    async with light_client(url) as http:
        meter = Meter(load)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(closed_loop(http, meter, jobs()))
            while not meter.steady:  # noqa: ASYNC110 - a meter has no event
                await asyncio.sleep(0.01)
            before = await scrape(port)
            while not meter.over:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            after = await scrape(port)
    delta = {name: after[name] - before.get(name, 0.0) for name in after}
    busy, idle = (delta[f"fusequeue_gpu_{name}_seconds_total"] for name in ("busy", "idle_while_queued"))
    return {
        "gpu_thread_idle_while_queued": round(idle / (busy + idle), 5),
        "busy_s": round(busy, 2),
        "images_per_second": round(meter.rate, 2),
        "rows_per_forward": round(delta["fusequeue_forward_rows_sum"] / delta["fusequeue_forward_rows_count"], 2),
        "uploads": int(delta["fusequeue_upload_seconds_count"]),
        "upload_ms": round(1000 * delta["fusequeue_upload_seconds_sum"] / delta["fusequeue_upload_seconds_count"], 1),
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--images", type=int, default=300, help="measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    load = ClientLoad(options.clients, options.images)
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch, s3(Path(scratch)) as storage:
        folder = Path(scratch)
        models = folder / "models.toml"
        models.write_text(MODELS_FILE.format(source=record.ROOT / "demo" / "model", rows=ROWS), "utf-8")
        settings = {"s3_bucket": BUCKET, "s3_endpoint_url": storage}
        settings |= {"s3_access_key_id": "bench", "s3_secret_access_key": "bench"}
        with (
            reserved_port("127.0.0.1", 9100) as port,
            up(folder, "--models", str(models), worker_port=str(port), **settings) as url,
        ):
            figures = asyncio.run(measure(url, port, load))
    record.report(options.json, figures, clients=load.clients, images=load.images, rows=ROWS, threads=1)


if __name__ == "__main__":
    main()
