"""`python -m bench.api.start`: how long `fusequeue` takes to start, and the memory of its processes.

Each turn times `fusequeue --help`, then starts `fusequeue up` with the demo model and a new data folder: seconds until
each process is ready and until the ready line, and the resident (RSS), proportional (PSS) and unique (USS) memory of
each part after one job. A first turn, which is not counted, reads the files into the page cache. Figures are medians
over the turns; `--json FILE` saves them.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from bench.common import record
from bench.common.clients import light_client
from bench.cost import part_of
from bench.over_http import up

HELP_CALLS = 3
POLL_S = 0.02
READY = re.compile(r"^([\w-]+): ready after", re.MULTILINE)
READY_LINE = "ready line"
KINDS = ("rss", "pss", "uss")
PROMPT = "a red circle on a blue ground, left"
SETTLE_S = 1.0  # after the job: uploads and allocators come to rest

Memory = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Turn:
    """Seconds of `--help`; seconds from the start of `up` to each readiness; MiB of each part by kind."""

    help_s: float
    ready_s: dict[str, float]
    memory_mib: Memory


class ReadyLines:
    """Context manager: the seconds at which `NAME: ready` first appears in a log that grows, by name."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._started = time.perf_counter()
        self.seen: dict[str, float] = {}

    def note(self, name: str) -> None:
        self.seen.setdefault(name, time.perf_counter() - self._started)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _poll(self) -> None:
        while READY_LINE not in self.seen and not self._ended.wait(POLL_S):
            text = self._log.read_text("utf-8", "replace") if self._log.exists() else ""
            for name in READY.findall(text):
                self.note(name)


def help_seconds() -> float:
    """Return the median wall time of `fusequeue --help`."""
    command = [sys.executable, "-m", "cli.main", "--help"]
    times = []
    for _ in range(HELP_CALLS):
        started = time.perf_counter()
        subprocess.run(command, cwd=record.ROOT, stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def memory_mib() -> Memory:
    """Return the memory of each part of `fusequeue up`: the sum of its processes, by kind."""
    total: Memory = {}
    for process in psutil.Process().children(recursive=True):
        try:
            part, memory = part_of(" ".join(process.cmdline())), process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        sums = total.setdefault(part, dict.fromkeys(KINDS, 0.0))
        for kind in KINDS:
            sums[kind] += getattr(memory, kind) / 2**20
    return total


async def run_job(url: str) -> None:
    """Run one demo job to its end."""
    async with light_client(url) as http:
        job = await http.post("/v1/jobs", {"model": "demo", "prompt": PROMPT, "seed": 7}, Prefer="wait=60")
    if job["status"] != "succeeded":
        raise RuntimeError(f"job {job['id']}: {job['status']} {job['error']}")


def measure() -> Turn:
    """Time the help, then start everything once and measure it."""
    help_s = help_seconds()
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch:
        folder = Path(scratch)
        with ReadyLines(folder / "up.log") as lines, up(folder) as url:
            lines.note(READY_LINE)
            asyncio.run(run_job(url))
            time.sleep(SETTLE_S)
            return Turn(help_s, lines.seen, memory_mib())


def figures_of(turns: Sequence[Turn]) -> dict[str, object]:
    """Return the medians of all turns."""
    memory = {
        part: {kind: round(statistics.median(turn.memory_mib[part][kind] for turn in turns)) for kind in KINDS}
        for part in sorted(turns[0].memory_mib)
    }
    memory["all"] = {
        kind: round(statistics.median(sum(part[kind] for part in turn.memory_mib.values()) for turn in turns))
        for kind in KINDS
    }
    names = sorted(turns[0].ready_s, key=turns[0].ready_s.__getitem__)
    return {
        "help_s": round(statistics.median(turn.help_s for turn in turns), 3),
        "ready_s": {name: round(statistics.median(turn.ready_s[name] for turn in turns), 2) for name in names},
        "memory_mib": memory,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    measure()
    turns = []
    for number in range(1, options.turns + 1):
        turns.append(measure())
        print(f"turn {number}: {figures_of(turns[-1:])}", flush=True)
    figures = figures_of(turns)
    print("medians:", figures)
    if options.json:
        record.write(options.json, figures, turns=options.turns)


if __name__ == "__main__":
    main()
