"""`python -m bench.fleet.pool`: a burst of jobs with `fusequeue pool`, from no workers to several and back to none.

Starts `fusequeue up --workers 0` and `fusequeue pool --min 0` with the demo model, submits the burst at once, and waits
until all jobs have ended and all workers have exited. `--plot` plots queued and running jobs and workers over time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import record
from bench.over_http import launched, up
from cli.pool.command import plot_svg
from demo.drawings import all_prompts
from fusequeue import Client, Job

TIMEOUT_S = 900.0
POLL_S = 0.25


@dataclass(frozen=True)
class Burst:
    """Number of jobs submitted at once, and options of the pool."""

    jobs: int
    max_workers: int
    steps: int
    target_wait_s: float
    cool_down_s: float


def submit(client: Client, burst: Burst) -> list[str]:
    """Submit all jobs in one request and return their ids."""
    prompts = all_prompts()
    bodies = (
        {"model": "demo", "prompt": prompts[at % len(prompts)].caption(), "seed": at, "steps": burst.steps}
        for at in range(burst.jobs)
    )
    results = list(client.submit_many(bodies))
    refused = [result.error for result in results if result.error is not None]
    if refused:
        raise RuntimeError(f"{len(refused)} of {burst.jobs} jobs were refused: {refused[0].message}")
    return [str(result.id) for result in results]


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; raises `RuntimeError` after `TIMEOUT_S`."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"timeout of {TIMEOUT_S:.0f} s waiting until {what}")
        time.sleep(POLL_S)


@contextmanager
def pooled(url: str, folder: Path, burst: Burst) -> Iterator[Path]:
    """Run `fusequeue pool` for the service of `folder` and yield its log."""
    log = folder / "pool.jsonl"
    options = [
        "--max",
        str(burst.max_workers),
        "--cool-down-s",
        str(burst.cool_down_s),
        "--url",
        url,
        "--log",
        str(log),
    ]
    command = [sys.executable, "-m", "cli.main", "pool", "--data-dir", str(folder / "data"), *options]
    with launched(command, folder / "pool.log", None):
        until(lambda: bool(rows(log)), "the pool polls")
        yield log


def rows(log: Path) -> list[dict[str, Any]]:
    """Return the complete lines of the log."""
    text = log.read_text("utf-8") if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def empty(row: dict[str, Any]) -> bool:
    return not any(row[name] for name in ("queued", "running", "ready", "starting", "draining", "failing"))


def figures(log_rows: list[dict[str, Any]], jobs: list[Job]) -> dict[str, Any]:
    """Return the figures of a burst; times in seconds since its submit."""
    started = min(job.created_at for job in jobs).timestamp()

    def first(name: str, least: int) -> float | None:
        return next((round(row["at"] - started, 2) for row in log_rows if row[name] >= least), None)

    most = max(row["ready"] for row in log_rows)
    return {
        "jobs": len(jobs),
        "ended_as": dict(Counter(job.status for job in jobs)),
        "attempts": dict(Counter(str(job.model_dump()["attempts"]) for job in jobs)),
        "most_workers_ready": most,
        "workers_at_the_end": log_rows[-1]["ready"] + log_rows[-1]["starting"] + log_rows[-1]["draining"],
        "first_worker_started_s": first("starting", 1),
        "first_worker_ready_s": first("ready", 1),
        "all_workers_ready_s": first("ready", most),
        "last_job_ended_s": round(max(job.finished_at.timestamp() for job in jobs if job.finished_at) - started, 2),
        "empty_again_s": round(log_rows[-1]["at"] - started, 2),
        "mean_rows": round(sum(job.batching.mean_rows for job in jobs if job.batching) / len(jobs), 2),
    }


def run(burst: Burst) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the burst and return its figures and the rows of the pool's log."""
    with tempfile.TemporaryDirectory(prefix="fusequeue-pool-") as name:
        folder = Path(name)
        with (
            up(folder, "--workers", "0", target_wait_s=str(burst.target_wait_s)) as url,
            pooled(url, folder, burst) as log,
            Client(url) as client,
        ):
            ids = submit(client, burst)
            jobs = [client.wait(job_id, timeout_s=TIMEOUT_S) for job_id in ids]
            until(lambda: empty(rows(log)[-1]), "all workers have exited")
            log_rows = rows(log)
    return figures(log_rows, jobs), log_rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--max", type=int, default=2, dest="max_workers")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--target-wait-s", type=float, default=5.0)
    parser.add_argument("--cool-down-s", type=float, default=5.0)
    parser.add_argument("--json", type=Path, help="save the figures and their environment")
    parser.add_argument("--plot", type=Path, help="plot the burst to this SVG file")
    options = parser.parse_args(argv)
    burst = Burst(options.jobs, options.max_workers, options.steps, options.target_wait_s, options.cool_down_s)
    measured, log_rows = run(burst)
    for name, value in measured.items():
        print(f"{name.replace('_', ' ')}: {value}")
    if options.json is not None:  # before the plot, which would change the working tree
        record.write(options.json, {"pool": measured})
    if options.plot is not None:
        options.plot.write_text(plot_svg(log_rows), "utf-8")


if __name__ == "__main__":
    main()
