"""`python -m bench.api.shared_port`: requests per second of `fusequeue up` with one API process, and with several.

Starts `fusequeue up --workers 0` with each number of `--api-workers`, all with the same Redis settings and data folders
of their own. In turns 32 connections submit jobs to each, and then read one. The load shares the cores with all of
them. Figures are medians over the turns; `--json FILE` saves them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from bench.api.__main__ import LIMITS, read, submits
from bench.api.http_load import ClosedLoop, run
from bench.common import record
from bench.over_http import up

CONNECTIONS = 32

Rates = dict[str, list[float]]


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def measure(ports: Mapping[int, int], turns: int, seconds: float) -> dict[int, Rates]:
    """Return the rates of each turn, by number of processes and kind of request; `ports` are by number."""
    kinds = {processes: {"submit": submits(), "read": read(port)} for processes, port in ports.items()}
    rates: dict[int, Rates] = {processes: {"submit": [], "read": []} for processes in ports}
    for turn in range(turns + 1):  # the first one, in which connections and caches begin, does not count
        for processes in sorted(ports, reverse=turn % 2 == 1):
            for kind, request in kinds[processes].items():
                rate = asyncio.run(run(ports[processes], ClosedLoop(CONNECTIONS, seconds, request)))
                if turn:
                    rates[processes][kind].append(rate.per_second)
        print(f"turn {turn}: {[{kind: values[-1:] for kind, values in each.items()} for each in rates.values()]}")
    return rates


def figures_of(rates: Mapping[int, Rates]) -> dict[str, object]:
    """Return requests per second by number of processes, and the ratio to the first number within each turn."""
    base = next(iter(rates.values()))
    figures: dict[str, object] = {}
    for processes, kinds in rates.items():
        for kind, values in kinds.items():
            ratios = [value / first for value, first in zip(values, base[kind], strict=True)]
            figures[f"{kind}, --api-workers {processes}"] = {
                "per_second": round(statistics.median(values)),
                "ratio": round(statistics.median(ratios), 2),
            }
    return figures


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-") as scratch, ExitStack() as stack:
        ports = {}
        for processes in options.processes:
            folder = Path(scratch) / str(processes)
            folder.mkdir()
            service = up(folder, "--workers", "0", "--api-workers", str(processes), **LIMITS)
            ports[processes] = port_of(stack.enter_context(service))
        figures = figures_of(measure(ports, options.turns, options.seconds))
    print(figures)
    if options.json:
        record.write(options.json, figures, turns=options.turns, seconds=options.seconds, connections=CONNECTIONS)


if __name__ == "__main__":
    main()
