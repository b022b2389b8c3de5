"""The turns: in each, every server is started, warmed up, measured and ended, in rotated order.

One server runs at a time. An idle one still polls, and stopping it with a signal instead would let its own health
checks and leases expire. Before and after each load the pipeline is called in this process, while the server idles.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common.service import ROWS, SIDE, launched
from bench.engine.comparison import call
from bench.interactive import percentile
from bench.over_http import ComparedRate
from bench.peers.peer_loads import (
    MEAN_STEPS,
    ImageClient,
    PeerLoad,
    arrivals,
    closed_loop,
    open_loop,
    warm_up,
)
from bench.peers.peer_servers import started

WARM_UP_SEED = 1_000_000
REFERENCE_BATCHES, REFERENCE_SOLOS = 4, 8
MIXED_REQUESTS = 24  # that a peer takes at once, to group them by steps
BUSY = "import os; os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\nwhile True: pass"


Rows = dict[str, tuple[float, float]]
"""Ratio and value by row of the table."""


@dataclass(frozen=True)
class PeerPlan:
    """What a run measures: servers, loads, and in each turn images of a closed loop and seconds of arrivals."""

    servers: Sequence[str]
    loads: Sequence[PeerLoad]
    images: int
    seconds: float


@dataclass(frozen=True)
class Bare:
    """The pipeline in this process, without a server: images per second of full batches, seconds of a solo call."""

    full_rate: float
    solo_s: float


@dataclass(frozen=True)
class MeasuredRow:
    """A row of the table from one turn of a server: its ratio to the bare pipeline, and images/s or seconds."""

    server: str
    row: str
    turn: int
    ratio: float
    value: float


@dataclass
class PeerTurns:
    """What the turns measured so far, and what failed."""

    measured: list[MeasuredRow] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def bare(pipeline: Any) -> Bare:
    """Measure the pipeline's own calls, in CPU time of this thread, which computes them.

    In wall time an idle server counts too: beside LitServe's processes, which look for requests all the time, one solo
    call took so much longer that LitServe's requests seemed to take 0.88 of it.
    """
    started_at = time.thread_time()
    for _ in range(REFERENCE_BATCHES):
        call(pipeline, range(ROWS), SIDE, MEAN_STEPS)
    batches_at = time.thread_time()
    for _ in range(REFERENCE_SOLOS):
        call(pipeline, range(1), SIDE, MEAN_STEPS)
    solo_s = (time.thread_time() - batches_at) / REFERENCE_SOLOS
    return Bare(REFERENCE_BATCHES * ROWS / (batches_at - started_at), solo_s)


def closed_ratio(load: PeerLoad, rate: float, before: Bare, after: Bare) -> float:
    """Return the images per second relative to full batches; with one client, seconds relative to a solo call."""
    if load.clients == 1:
        return 1 / rate / statistics.mean((before.solo_s, after.solo_s))
    return ComparedRate(rate, before.full_rate, after.full_rate).of_full


@contextmanager
def core_taken(folder: Path) -> Iterator[None]:
    """Keep one core busy with another process, which the system lets compete with all that may run there."""
    with launched([sys.executable, "-c", BUSY], folder / "busy.log", None):
        yield


def rotated(servers: Sequence[str], turn: int) -> list[str]:
    """Return the order of a turn: each server is first, second, ... equally often."""
    first = turn % len(servers)
    return [*servers[first:], *servers[:first]]


class SideBySide:
    """Measures the turns of a plan on one model."""

    def __init__(self, plan: PeerPlan, pipeline: Any, model: Path, folder: Path) -> None:
        self._plan = plan
        self._pipeline = pipeline
        self._model = model
        self._folder = folder

    def run_turn(self, turn: int, turns: PeerTurns) -> None:
        """Measure all servers; one that fails is left out of the turn."""
        equal = [load for load in self._plan.loads if not load.mixed]
        mixed = [load for load in self._plan.loads if load.mixed]
        for server in rotated(self._plan.servers, turn):
            for requests, loads in ((ROWS, equal), (MIXED_REQUESTS, mixed)):
                if not loads:
                    continue
                try:
                    self._run_server(server, turn, requests, loads, turns)
                except Exception as error:
                    turns.failures.append(f"turn {turn}, {server}: {error!r}")
                    print(turns.failures[-1], file=sys.stderr, flush=True)

    def _run_server(self, server: str, turn: int, requests: int, loads: Sequence[PeerLoad], turns: PeerTurns) -> None:
        folder = self._folder / f"{turn}-{server}-{loads[0].name}"
        with started(server, self._model, folder, requests) as client:
            before = bare(self._pipeline)
            for load in loads:
                asyncio.run(warm_up(client, load, before.full_rate, WARM_UP_SEED + turn))
                run = self._closed if load.clients else self._open
                rows, before = run(client, load, turn, before)
                for row, (ratio, value) in rows.items():
                    turns.measured.append(MeasuredRow(server, row, turn, ratio, value))
                    print(f"turn {turn}, {server}, {row}: {ratio:.3f} ({value:.3f})", flush=True)

    def _closed(self, client: ImageClient, load: PeerLoad, turn: int, before: Bare) -> tuple[Rows, Bare]:
        images = self._plan.images if load.clients > 1 else math.ceil(self._plan.images / 4)
        rate = asyncio.run(closed_loop(client, load, images, turn))
        after = bare(self._pipeline)
        return {load.name: (closed_ratio(load, rate, before, after), rate)}, after

    def _open(self, client: ImageClient, load: PeerLoad, turn: int, before: Bare) -> tuple[Rows, Bare]:
        times = arrivals(turn, load.share * before.full_rate, self._plan.seconds)
        latencies = asyncio.run(open_loop(client, times, turn))
        after = bare(self._pipeline)
        solo_s = statistics.mean((before.solo_s, after.solo_s))
        quantiles = {share: percentile(latencies, share) for share in (0.5, 0.99)}
        return {f"{load.name} p{share * 100:.0f}": (at / solo_s, at) for share, at in quantiles.items()}, after
