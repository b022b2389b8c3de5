"""`python -m bench.queue.subscribers`: ten thousand event streams at one API process.

Starts a redis-server and one API process, submits and claims a job for each subscriber, and subscribes over plain
sockets. Then it settles jobs at a steady rate and at once, and measures the delay from the settle to the terminal event
at the client, and the memory of the API process. `--json FILE` saves the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import httpx

from bench.common import record
from bench.over_http import launched
from bench.queue.filling import MODEL, PROMPT, submit
from bench.queue.private_redis import private_redis
from bench.queue.rounds import outcome
from cli.up.ports import reserved_port
from shared.config.settings import Settings
from shared.job import Job
from shared.queue import Claim, Queue, Submission
from shared.queue.jobs import MAX_SUBMISSIONS
from shared.runtime.clock import new_id, now_ms

HOST = "127.0.0.1"
START_S = 60.0
CONNECT_AT_ONCE = 50
EVENT_S = 60.0
SPARE_FILES = 500
FIRST_EVENT, LAST_EVENT = b"event: state", b'"status":"succeeded"'


class Load(NamedTuple):
    """Number of subscribers, of jobs settled per second, how many so, and how many at once."""

    subscribers: int
    rate: float
    paced: int
    burst: int


class Stream(asyncio.Protocol):
    """One subscriber: a plain socket that notes when the first and the terminal event arrive."""

    def __init__(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._request = request
        self._seen = b""
        self.subscribed: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[float] = loop.create_future()
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        at = time.perf_counter()
        seen = self._seen + data
        if not self.subscribed.done() and FIRST_EVENT in seen:
            self.subscribed.set_result(None)
        if not self.ended.done() and LAST_EVENT in seen:
            self.ended.set_result(at)
        self._seen = seen[-len(LAST_EVENT) :] if self.subscribed.done() else seen

    def connection_lost(self, exc: Exception | None) -> None:
        for waiting in (self.subscribed, self.ended):
            if not waiting.done():
                waiting.set_exception(ConnectionError(f"the stream ended early: {exc!r}, {self._seen[-500:]!r}"))
                waiting.exception()  # read here too: otherwise asyncio logs it


@dataclass
class Delays:
    """Milliseconds from settles to the clients, and streams that ended before: their clients would connect again."""

    ms: list[float] = field(default_factory=list)
    ended_early: int = 0

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.ms)
        p99 = ordered[-1 - len(ordered) // 100]
        return {
            "events": len(ordered),
            "ended_early": self.ended_early,
            "median_ms": round(statistics.median(ordered), 1),
            "p99_ms": round(p99, 1),
            "max_ms": round(ordered[-1], 1),
        }


@contextmanager
def api(folder: Path, redis_url: str) -> Iterator[tuple[int, Popen[bytes]]]:
    """Run one API process; yield its port and process."""
    command = [sys.executable, "-m", "api", "--port"]
    settings = {"redis_url": redis_url, "namespace": "bench", "storage_dir": str(folder / "storage")}
    settings["models"] = str(record.ROOT / "models.toml")
    with (
        reserved_port(HOST, 8700) as port,
        launched([*command, str(port)], folder / "api.log", None, **settings) as process,
    ):
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://{HOST}:{port}/readyz", timeout=5, trust_env=False).is_success:
                    break
            if time.monotonic() > deadline:
                raise RuntimeError((folder / "api.log").read_text()[-2000:])
            time.sleep(0.1)
        yield port, process


def resident_kb(pid: int) -> int:
    """Return the resident memory of a process and its children: the parent watch starts the API as its child."""
    status = Path(f"/proc/{pid}/status").read_text()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(status.split("VmRSS:")[1].split()[0]) + sum(resident_kb(int(child)) for child in children)


async def running_jobs(queue: Queue, count: int) -> list[Claim]:
    """Submit and claim jobs."""
    jobs = []
    for _ in range(count):
        at = now_ms()
        job = Job(
            id=new_id("job", at),
            tenant="default",
            created_at_ms=at,
            model=MODEL,
            width=64,
            height=64,
            prompt=PROMPT,
            seed=7,
            steps=8,
            guidance_scale=4.0,
        )
        jobs.append(Submission(job, f"{MODEL}-one", window_ms=0, max_batch=64))
    for first in range(0, count, MAX_SUBMISSIONS):
        await submit(queue, jobs[first : first + MAX_SUBMISSIONS])
    claims: list[Claim] = []
    while len(claims) < count:
        claims += await queue.claims.claim("bench", [MODEL], 64)
    return claims


@contextlib.asynccontextmanager
async def subscribed(port: int, claims: list[Claim]) -> AsyncIterator[list[Stream]]:
    """Open one stream per claim, and wait for the first event of each."""
    loop = asyncio.get_running_loop()
    streams: list[Stream] = []
    try:
        for first in range(0, len(claims), CONNECT_AT_ONCE):
            some = []
            for one in claims[first : first + CONNECT_AT_ONCE]:
                path = f"GET /v1/jobs/{one.job.id}/events HTTP/1.1\r\nhost: {HOST}:{port}\r\n\r\n"
                stream = Stream(path.encode())
                streams.append(stream)
                some.append(stream)
                await loop.create_connection(lambda stream=stream: stream, HOST, port)  # type: ignore[misc]
            async with asyncio.timeout(EVENT_S):
                await asyncio.gather(*(stream.subscribed for stream in some))
        yield streams
    finally:
        for stream in streams:
            if stream.transport is not None:
                stream.transport.close()


async def settle(queue: Queue, claim: Claim, stream: Stream, delays: Delays) -> None:
    """Settle a job and wait for its terminal event."""
    started = time.perf_counter()
    await queue.claims.settle("bench", claim.job.id, claim.epoch, outcome(claim))
    try:
        async with asyncio.timeout(EVENT_S):
            delays.ms.append(1000 * (await stream.ended - started))
    except ConnectionError:
        delays.ended_early += 1


async def measure(redis_url: str, port: int, pid: int, load: Load) -> dict[str, Any]:
    """Subscribe, settle, and return the figures."""
    settings = Settings(redis_url=redis_url, namespace="bench", max_queued_jobs=10**6, lease_ms=600_000)
    queue = Queue.connect(settings.model_copy(update={"max_queued_jobs_per_tenant": 10**6}))
    try:
        claims = await running_jobs(queue, load.subscribers + 100)
        async with subscribed(port, claims[load.subscribers :]):  # everything is imported and connected
            pass
        before_kb, started = resident_kb(pid), time.monotonic()
        async with subscribed(port, claims[: load.subscribers]) as streams:
            connected_s, after_kb = time.monotonic() - started, resident_kb(pid)
            pairs = list(zip(claims, streams, strict=False))
            print(f"{len(streams):,} streams in {connected_s:.0f} s, API {after_kb / 1024:.0f} MiB", flush=True)
            paced, burst = Delays(), Delays()
            async with asyncio.TaskGroup() as settling:
                for claim, stream in pairs[: load.paced]:
                    settling.create_task(settle(queue, claim, stream, paced))
                    await asyncio.sleep(1 / load.rate)
            some = pairs[load.paced : load.paced + load.burst]
            await asyncio.gather(*(settle(queue, claim, stream, burst) for claim, stream in some))
            peak_kb = resident_kb(pid)
    finally:
        await queue.close()
    return {
        "subscribers": load.subscribers,
        "subscribed_per_second": round(load.subscribers / connected_s),
        "kb_per_subscriber": round((after_kb - before_kb) / load.subscribers, 1),
        "api_mb_before_with_all_and_at_the_end": [round(kb / 1024) for kb in (before_kb, after_kb, peak_kb)],
        f"settled_{load.rate:g}_per_second": paced.figures(),
        "settled_at_once": burst.figures(),
    }


def allow_files(count: int) -> None:
    """Allow this process and its children `count` open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise RuntimeError(f"this needs {count} open files, the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, save and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subscribers", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=100.0, help="jobs settled per second")
    parser.add_argument("--paced", type=int, default=3_000, help="jobs settled at this rate")
    parser.add_argument("--burst", type=int, default=1_000, help="jobs settled at once")
    parser.add_argument("--json", type=Path, help="save the figures and their environment")
    options = parser.parse_args(argv)
    load = Load(options.subscribers, options.rate, options.paced, options.burst)
    allow_files(load.subscribers + SPARE_FILES)
    with (
        tempfile.TemporaryDirectory(prefix="fusequeue-streams-") as name,
        private_redis(Path(name)) as redis_url,
        api(Path(name), redis_url) as (port, process),
    ):
        figures = asyncio.run(measure(redis_url, port, process.pid, load))
    for title, value in figures.items():
        print(f"{title.replace('_', ' ')}: {value}")
    if options.json is not None:
        record.write(options.json, figures)
    return figures


if __name__ == "__main__":
    main()
