"""What the queue learns from jobs, run from its Lua sources: arrival rates with readiness, and device times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lupa import lua51

from bench.simulator.kinds import JobKind, SimulatedJob

LUA = Path("shared/queue/lua")


def _functions(sources: tuple[str, ...], names: str) -> tuple[lua51.LuaRuntime, Any]:
    lua = lua51.LuaRuntime()
    text = "\n".join((LUA / name).read_text("utf-8") for name in sources)
    return lua, lua.execute(f"{text}\nreturn {names}")


class Readiness:
    """When the queued jobs of a kind are ready; with a window of 0 when they arrive."""

    def __init__(self, window_s: float) -> None:
        self._window_ms = 1000 * window_s
        self._lua, (self._next_gap, self._ready_at) = _functions(
            ("lib/readiness.lua",), "readiness.next_gap, readiness.ready_at"
        )
        self._last: dict[JobKind, float] = {}
        self._gap: dict[JobKind, float | None] = {}

    def add(self, kind: JobKind, arrival_s: float) -> None:
        last = self._last.get(kind)
        since_ms = None if last is None else 1000 * (arrival_s - last)
        self._gap[kind] = self._next_gap(self._gap.get(kind), since_ms, self._window_ms)
        self._last[kind] = arrival_s

    def ready_ms(self, kind: JobKind, now_s: float, oldest_s: float, slots: int, start_by_ms: float | None) -> float:
        """Return when `slots` jobs are ready; the oldest has waited since `oldest_s`, one is to start by then."""
        if not self._window_ms:
            return 1000 * oldest_s
        state = {
            "now": 1000 * now_s,
            "oldest": 1000 * oldest_s,
            "slots": slots,
            "efficient_rows": kind.rows,
            "window": self._window_ms,
            "gap": self._gap.get(kind),
            "start_by": start_by_ms,
        }
        return float(self._ready_at(self._lua.table_from(state)))


class DeviceTimes:
    """What jobs take: it decides latest starts, and which jobs can no longer meet their deadlines."""

    def __init__(self) -> None:
        names = ("device_times.after", "device_times.means", "device_times.bound", "latest_start.of")
        sources = ("deadlines/device_times.lua", "deadlines/latest_start.lua")
        self._lua, functions = _functions(sources, ", ".join(names))
        self._after, self._means, self._bound, self._latest_start = functions
        self._known: dict[JobKind, Any] = {}

    def learn(self, job: SimulatedJob, now_s: float) -> None:
        run, least = 1000 * job.run_s, 1000 * job.least_s
        times = {"step": run / job.arrival.steps, "rest": 0, "run": run, "least_step": least}
        self._known[job.kind] = self._after(self._of(job.kind), self._lua.table_from(times), 1000 * now_s)

    def run_ms(self, kind: JobKind, now_s: float) -> float:
        return float(self._means_of(kind, now_s)[0])

    def latest_start_ms(self, job: SimulatedJob, deadline_s: float, now_s: float) -> int:
        step_ms = self._means_of(job.kind, now_s)[1]
        return int(self._latest_start(1000 * deadline_s, step_ms, job.arrival.steps))

    def misses(self, job: SimulatedJob, deadline_s: float, now_s: float) -> bool:
        """Return whether a job can no longer meet its deadline."""
        return 1000 * (deadline_s - now_s) <= float(self._bound(self._of(job.kind), job.arrival.steps, 1000 * now_s))

    def _means_of(self, kind: JobKind, now_s: float) -> tuple[Any, ...]:
        means = self._means(self._of(kind), 1000 * now_s)
        return means if isinstance(means, tuple) else (means, None)

    def _of(self, kind: JobKind) -> Any:
        return self._known.get(kind) or self._lua.table()
