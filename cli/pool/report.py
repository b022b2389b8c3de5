"""What a pool tells: a line when its workers change, a log of all that changes, and a plot of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from cli.output import CommandConsole
from cli.pool.pool import PoolStatus
from cli.up.process import BoundedLog
from shared.runtime.plots import Panel, times_svg

Row: TypeAlias = dict[str, Any]


class Report:
    """Tells how a pool stands; `log` gets a line of JSON at each change, and holds at most twice 5 MiB."""

    def __init__(self, screen: CommandConsole, log: Path | None) -> None:
        self._screen = screen
        self._log = None if log is None else BoundedLog(log)
        self._began_s = time.time()
        self._last: PoolStatus | None = None

    def told(self, standing: PoolStatus) -> None:
        """Take in how the pool stands now."""
        if standing == self._last:
            return
        row = {"at": round(time.time(), 3), **asdict(standing)}
        if self._log is not None:
            self._log.write(json.dumps(row).encode() + b"\n")
        if self._last is None or _workers(standing) != _workers(self._last):
            if self._screen.as_json:
                self._screen.one(row, ())
            self._screen.say(f"{datetime.now(UTC).astimezone():%H:%M:%S}  {words(standing)}")
        self._last = standing

    def plot(self, path: Path) -> None:
        """Draw what the log tells of this run."""
        if self._log is not None:
            older = self._log.path.with_name(self._log.path.name + ".1")
            rows = [row for file in (older, self._log.path) if file.exists() for row in _rows(file)]
            path.write_text(drawn([row for row in rows if row["at"] >= self._began_s]), "utf-8")

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def words(standing: PoolStatus) -> str:
    """Return a standing as a person reads it."""
    parts = [f"{standing.ready} ready"]
    parts += [
        f"{getattr(standing, name)} {name}" for name in ("starting", "draining", "failing") if _has(standing, name)
    ]
    told = f"{standing.waiting} wait; {standing.wanted} wanted, {', '.join(parts)}"
    return f"{told} ({standing.reasons[0]})" if standing.reasons else told


def drawn(rows: Sequence[Row]) -> str:
    """Return the plot of a log's rows: what waits and runs above, the workers below."""
    began = rows[0]["at"] if rows else 0.0

    def series(*names: str) -> list[tuple[float, float]]:
        return [(row["at"] - began, sum(row[name] for name in names)) for row in rows]

    jobs = Panel("pictures waiting, jobs running", {"waiting": series("waiting"), "running": series("running")})
    workers = Panel("workers", {"wanted": series("wanted"), "ready": series("ready"), "busy": series("busy")})
    return times_svg("fusequeue pool", [jobs, workers])


def _rows(path: Path) -> Iterable[Row]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _has(standing: PoolStatus, name: str) -> bool:
    return bool(getattr(standing, name))


def _workers(standing: PoolStatus) -> tuple[int, ...]:
    return (standing.wanted, standing.ready, standing.starting, standing.draining, standing.failing)
