"""`python -m bench.api.traces`: CPU time per job over HTTP with traces, relative to that without.

Starts `fusequeue up` twice with the demo model, with `FUSEQUEUE_TRACES` and without, and a receiver that counts what it
is sent. In turns, clients of one of them submit jobs with the model's default steps: each submits a job, waits for it,
fetches its image and submits the next. CPU time is that of all its processes over the turn and the pause after it, in
which the last spans are sent. The cost is the CPU time that the API and the worker's main process, which trace, take
more, relative to that of all processes without traces. Figures are medians over the turns; `--json FILE` saves them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from bench.common import record
from bench.common.clients import ClientLoad, Meter, light_client, run_client
from bench.over_http import up
from demo.drawings import split_prompts

PAUSE_S = 7.0  # spans are sent every 5 s
ENGINE = "worker.engine"
TRACING = ("-m api", "-m worker")


@dataclass(frozen=True)
class TracedTurn:
    """One turn: images per second, and ms of CPU time per job of all processes and of those that trace."""

    rate: float
    all_ms: float
    tracing_ms: float


class SpanCounter:
    """OTLP/HTTP receiver that counts requests and bytes."""

    def __init__(self) -> None:
        self.requests = self.bytes = 0
        counter = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                counter.bytes += len(self.rfile.read(int(self.headers["content-length"])))
                counter.requests += 1
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@contextmanager
def counting() -> Iterator[SpanCounter]:
    """Run a receiver on a free port."""
    counter = SpanCounter()
    thread = threading.Thread(target=counter.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield counter
    finally:
        counter.server.shutdown()
        counter.server.server_close()


@dataclass(frozen=True)
class Service:
    """A running `fusequeue up` and its processes."""

    url: str
    processes: tuple[psutil.Process, ...]

    def cpu_s(self) -> tuple[float, float]:
        """Return the CPU time so far of all processes, and of those that trace."""
        by_command = [(" ".join(one.cmdline()), sum(one.cpu_times()[:2])) for one in self.processes if one.is_running()]
        tracing = (spent for line, spent in by_command if ENGINE not in line and any(part in line for part in TRACING))
        return sum(spent for _, spent in by_command), sum(tracing)


@contextmanager
def service(folder: Path, *, traces: bool) -> Iterator[Service]:
    """Run `fusequeue up` with its data in `folder`."""
    others = {one.pid for one in psutil.Process().children(recursive=True)}
    folder.mkdir()
    with up(folder, traces=str(traces)) as url:
        own = (one for one in psutil.Process().children(recursive=True) if one.pid not in others)
        yield Service(url, tuple(own))


def bodies(first: int) -> Iterator[dict[str, object]]:
    """Yield jobs without end, numbered from `first`: the held-out prompts in turns, with new seeds."""
    _, prompts = split_prompts()
    for number in itertools.count(first):
        yield {"model": "demo", "prompt": prompts[number % len(prompts)].caption(), "seed": number}


async def run_turn(service: Service, load: ClientLoad, first: int, pause_s: float) -> TracedTurn:
    """Run one turn of jobs numbered from `first`."""
    meter, jobs = Meter(load), bodies(first)
    all_s, tracing_s = service.cpu_s()
    async with light_client(service.url) as http, asyncio.TaskGroup() as clients:
        for _ in range(load.clients):
            clients.create_task(run_client(http, jobs, meter))
    await asyncio.sleep(pause_s)
    all_after_s, tracing_after_s = service.cpu_s()
    done = int(str(next(jobs)["seed"])) - first
    return TracedTurn(meter.rate, 1000 * (all_after_s - all_s) / done, 1000 * (tracing_after_s - tracing_s) / done)


def figures_of(plain: list[TracedTurn], traced: list[TracedTurn]) -> dict[str, Any]:
    """Return the medians; the cost and the ratio of rates are those within each turn."""
    costs = [(on.tracing_ms - off.tracing_ms) / off.all_ms for on, off in zip(traced, plain, strict=True)]
    rates = [on.rate / off.rate for on, off in zip(traced, plain, strict=True)]
    turns = {"off": plain, "on": traced}
    return {
        "cost": round(statistics.median(costs), 4),
        "cost_of_turns": [round(cost, 4) for cost in costs],
        "rate_of_off": round(statistics.median(rates), 3),
        "cpu_ms_per_job": {
            name: {
                "all": round(statistics.median(turn.all_ms for turn in those), 2),
                "api_and_worker": round(statistics.median(turn.tracing_ms for turn in those), 2),
            }
            for name, those in turns.items()
        },
        "images_per_second": {
            name: round(statistics.median(turn.rate for turn in those), 2) for name, those in turns.items()
        },
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--images", type=int, default=200, help="measured in each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--pause-s", type=float, default=PAUSE_S, help="after each turn, for the last spans")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    load = ClientLoad(options.clients, options.images)
    plain: list[TracedTurn] = []
    traced: list[TracedTurn] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusequeue-bench-")))
        counter = stack.enter_context(counting())
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = counter.url
        off = stack.enter_context(service(folder / "off", traces=False))
        on = stack.enter_context(service(folder / "on", traces=True))
        for at in range(options.turns + 1):  # the first one warms up
            pairs = [(off, plain), (on, traced)]
            for each, turns in pairs[:: 1 if at % 2 else -1]:
                turns.append(asyncio.run(run_turn(each, load, 10_000 * at, options.pause_s)))
                print(turns[-1], flush=True)
    figures = figures_of(plain[1:], traced[1:]) | {"received": {"requests": counter.requests, "bytes": counter.bytes}}
    print(figures)
    if options.json:
        record.write(options.json, figures, clients=load.clients, images_per_turn=load.images, threads=1)


if __name__ == "__main__":
    main()
