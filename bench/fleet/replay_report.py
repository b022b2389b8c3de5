"""Table and plot of the replays: workers wanted over time, GPU-seconds, waits and scale changes, before and now."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.fleet import decision
from bench.fleet.replays import REPLAYS, Replay
from bench.fleet.simulation import FleetSimulation
from shared.runtime.plots import Panel, timeline_svg

MAX_WORKERS = 32
COLUMNS = (
    *("replay", "needed", "code", "wanted above the need", "GPU-seconds", "p95 wait, s", "bulk jobs late"),
    *("scale changes", "most workers"),
)

Record = Mapping[str, Any]
"""The figures of one replay, as they are stored."""


def measure(replay: Replay, seed: int) -> Record:
    outcome = FleetSimulation(replay.load, decision.wanted, seed, MAX_WORKERS).run()
    return {
        "need": replay.need,
        "wanted": outcome.wanted,
        "above": replay.most_above(outcome),
        "gpu_s": round(outcome.gpu_s),
        "p95_s": round(outcome.wait_s(0.95)) if outcome.waits_s else None,
        "late": outcome.late if any(arrival.due_s is not None for arrival in replay.load.arrivals) else None,
        "changes": outcome.changes,
        "most": outcome.max_workers,
    }


def measure_all(seed: int) -> dict[str, Record]:
    replays = [make(random.Random(seed)) for make in REPLAYS]
    return {replay.load.name: measure(replay, seed) for replay in replays}


def print_table(records: Mapping[str, Mapping[str, Record]]) -> None:
    """Print the rows of each replay; `records` are by code, then by replay."""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name in next(iter(records.values())):
        for code, measured in records.items():
            one = measured[name]
            need = " to ".join(
                dict.fromkeys(str(row[1]) for row in sorted(one["need"], key=lambda row: row[1]) if row[1])
            )
            figures = (one[key] for key in ("above", "gpu_s", "p95_s", "late", "changes", "most"))
            shown = " | ".join("" if figure is None else str(figure) for figure in figures)
            print(f"| {name} | {need} | {code} | {shown} |")


def plot(records: Mapping[str, Mapping[str, Record]]) -> str:
    """Return a plot of the wanted and the needed workers of each replay."""
    panels = []
    for name in next(iter(records.values())):
        series: dict[str, Sequence[tuple[float, float]]] = {
            code: [(at, min(workers, MAX_WORKERS)) for at, workers in measured[name]["wanted"]]
            for code, measured in records.items()
        }
        need = [(at, workers) for at, workers in next(iter(records.values()))[name]["need"]]
        panels.append(Panel(name, {**series, "needed": need}))
    return timeline_svg(f"wanted workers, up to {MAX_WORKERS}", panels, columns=2)


def read(path: Path) -> dict[str, Record]:
    return dict(json.loads(path.read_text("utf-8")))


def write(path: Path, measured: Mapping[str, Record]) -> None:
    rows = ",\n".join(f'"{name}": {json.dumps(one)}' for name, one in measured.items())
    path.write_text(f"{{\n{rows}\n}}\n", "utf-8")
