"""The command `fusequeue pool`, and its report: a line when its workers change, a log of all changes, and a plot."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from cli.client_options import CommandConsole, Exit, Json, Key, Url, exit_on_error
from cli.messages import print_error
from cli.pool.pool import Pool, PoolBounds, PoolProcesses, PoolStatus
from cli.up import command as up_command
from cli.up import environment
from cli.up.child_process import BoundedLog
from fusequeue import AsyncClient
from shared.config import models_file, settings
from shared.errors import FusequeueError
from shared.runtime import plots

REQUEST_TIMEOUT_S = 5.0

Row: TypeAlias = dict[str, Any]


def pool(
    min_workers: Annotated[int, typer.Option("--min", min=0, help="Fewest workers.")] = 0,
    max_workers: Annotated[
        int | None,
        typer.Option("--max", min=1, help="Most workers. Default: one per GPU (or `devices` of them), else one."),
    ] = None,
    cool_down_s: Annotated[float, typer.Option(min=0, help="Seconds before surplus workers are drained.")] = 60.0,
    poll_interval_s: Annotated[float, typer.Option(min=0.05, max=60, help="Seconds between polls.")] = 0.5,
    data_dir: Annotated[
        Path,
        typer.Option(help="Folder for logs, and of the `fusequeue up` that gives Redis, storage, models and URL."),
    ] = Path("data"),
    models: Annotated[Path | None, typer.Option(help="Models file. Default: ./models.toml, else the demo's.")] = None,
    log: Annotated[Path | None, typer.Option(dir_okay=False, help="Append a line of JSON for each change.")] = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Plot this run's log as SVG; needs --log.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Run as many workers on this machine as the service wants, at most one per GPU by default. Ctrl-C drains them."""
    if plot is not None and log is None:
        raise typer.BadParameter("needs a log; add --log", param_hint="--plot")
    environment.use_deployment(data_dir, os.environ)
    environ = {name: value for name, value in os.environ.items() if value or not name.startswith(settings.PREFIX)}
    if max_workers is not None and min_workers > max_workers:
        raise typer.BadParameter(f"must not exceed --max, which is {max_workers}", param_hint="--min")
    with exit_on_error():
        service = AsyncClient(url, api_key=api_key, timeout_s=REQUEST_TIMEOUT_S, retries=0)
        try:
            if plot is not None:
                plots.require_matplotlib()
            loaded = settings.load()
            settings.withhold_permissions(loaded)
            models = environment.models_path(models, environ)
            devices = models_file.load(models, loaded.batch_rules).devices
            if max_workers is None:
                max_workers = max(min_workers, environment.workers_of_gpus(environment.gpus(environ), devices))
            bounds = PoolBounds(min_workers, max_workers, cool_down_s)
            report = PoolReport(CommandConsole(as_json), log)
            asyncio.run(_run(service, bounds, poll_interval_s, data_dir.resolve(), models, devices, report, environ))
            if plot is not None:
                report.plot(plot)
        except (FusequeueError, OSError) as error:
            print_error(getattr(error, "message", error))
            raise typer.Exit(Exit.USAGE) from None


async def _run(
    service: AsyncClient,
    bounds: PoolBounds,
    poll_interval_s: float,
    data_dir: Path,
    models: Path,
    devices: int,
    report: PoolReport,
    environ: dict[str, str],
) -> None:
    loaded = settings.load()
    env = environment.child_environment(data_dir, bounds.max_workers * devices, models, loaded, environ)
    workers_env = environment.worker_environments(bounds.max_workers, env, devices)
    grace_s = loaded.drain_timeout_s + up_command.AFTER_DRAIN_S
    folder, print_status = data_dir / "pool", up_command.print_status
    with up_command.locked(folder), closing(report):
        processes = PoolProcesses(workers_env, env, folder, print_status, grace_s)
        async with service:
            pool = Pool(service, loaded.namespace, processes, bounds, poll_interval_s, print_status)
            with up_command.on_stop_signal(pool.stop):
                await pool.run(report.update)


class PoolReport:
    """Prints changes of the workers; `log` gets a line of JSON for each change and holds at most twice 5 MiB."""

    def __init__(self, console: CommandConsole, log: Path | None) -> None:
        self._console = console
        self._log = None if log is None else BoundedLog(log)
        self._started_s = time.time()
        self._last: PoolStatus | None = None

    def update(self, status: PoolStatus) -> None:
        """Log and print the current status if it changed."""
        if status == self._last:
            return
        row = {"at": round(time.time(), 3), **asdict(status)}
        if self._log is not None:
            self._log.write(json.dumps(row).encode() + b"\n")
        if self._last is None or _workers(status) != _workers(self._last):
            if self._console.as_json:
                self._console.record(row, ())
            else:
                self._console.out.print(f"{datetime.now():%H:%M:%S}  {summary(status)}", markup=False)
        self._last = status

    def plot(self, path: Path) -> None:
        """Plot the log of this run."""
        if self._log is not None:
            rotated = self._log.path.with_name(self._log.path.name + ".1")
            texts = [file.read_text("utf-8") for file in (rotated, self._log.path) if file.exists()]
            rows = [json.loads(line) for text in texts for line in text.splitlines()]
            path.write_text(plot_svg([row for row in rows if row["at"] >= self._started_s]), "utf-8")

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def summary(status: PoolStatus) -> str:
    """Return a status on one line."""
    states = {name: getattr(status, name) for name in ("starting", "draining", "failing")}
    counts = [f"{status.ready} ready", *(f"{count} {name}" for name, count in states.items() if count)]
    text = f"{status.queued} queued; {status.target} wanted, {', '.join(counts)}"
    return f"{text} ({status.reasons[0]})" if status.reasons else text


def plot_svg(rows: Sequence[Row]) -> str:
    """Return a plot of log rows: queued slots and running jobs above, workers below."""
    started = rows[0]["at"] if rows else 0.0

    def series(name: str) -> list[tuple[float, float]]:
        return [(row["at"] - started, row[name]) for row in rows]

    jobs = plots.Panel("images queued, jobs running", {name: series(name) for name in ("queued", "running")})
    workers = plots.Panel("workers", {name: series(name) for name in ("target", "ready", "busy")})
    return plots.timeline_svg("fusequeue pool", [jobs, workers])


def _workers(status: PoolStatus) -> tuple[int, ...]:
    return (status.target, status.ready, status.starting, status.draining, status.failing)
