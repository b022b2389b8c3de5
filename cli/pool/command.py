"""The command `fusequeue pool`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cli.client_options import Json, Key, Url
from cli.keys import point_at
from cli.output import CommandConsole, Exit, exit_on_error
from cli.pool.decisions import Bounds
from cli.pool.pool import Pool
from cli.pool.processes import PoolProcesses
from cli.pool.report import Report
from cli.up import command
from fusequeue import AsyncClient
from shared.config import models_file, settings
from shared.errors import FusequeueError

ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    bounds: Bounds
    look_every_s: float
    data_dir: Path
    models: Path | None
    service: tuple[str | None, str | None]


def pool(
    least: Annotated[int, typer.Option("--min", min=0, help="Fewest workers.")] = 0,
    most: Annotated[
        int | None, typer.Option("--max", min=1, help="Most workers. Unset: one a GPU; one where there is none.")
    ] = None,
    cool_down_s: Annotated[float, typer.Option(min=0, help="Seconds before workers not wanted any more leave.")] = 60.0,
    look_every_s: Annotated[float, typer.Option(min=0.05, max=60, help="Seconds between two looks.")] = 0.5,
    data_dir: Annotated[
        Path, typer.Option(help="For logs; and of the `fusequeue up` here, unless FUSEQUEUE_REDIS_URL names a Redis.")
    ] = Path("data"),
    models: Annotated[Path | None, typer.Option(help="The models file. Unset: ./models.toml, or the demo's.")] = None,
    log: Annotated[Path | None, typer.Option(dir_okay=False, help="Append lines of JSON as things change.")] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw the log of this run at its end, as SVG; needs --log.")
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Run as many workers on this machine as the service wants, from none to one a GPU. Ctrl-C drains them all."""
    if plot is not None and log is None:
        raise typer.BadParameter("it is drawn from a log: name one with --log", param_hint="--plot")
    environ = {name: value for name, value in os.environ.items() if value or not name.startswith(settings.PREFIX)}
    most = most if most is not None else max(1, least, len(command.gpus(environ)))
    if least > most:
        raise typer.BadParameter(f"it must not be above --max, which is {most}", param_hint="--min")
    options = Options(Bounds(least, most, cool_down_s), look_every_s, data_dir.resolve(), models, (url, api_key))
    with exit_on_error():
        try:
            report = Report(CommandConsole(as_json), log)
            asyncio.run(_run(options, report, environ))
            if plot is not None:
                report.plot(plot)
        except (FusequeueError, OSError) as error:
            command.tell(f"fusequeue: {getattr(error, 'message', error)}")
            raise typer.Exit(Exit.USAGE) from None


async def _run(options: Options, report: Report, environ: Mapping[str, str]) -> None:
    configured = settings.load()
    point_at(options.data_dir, found := dict(environ))
    models = command.chosen_models_file(options.models, found)
    models_file.load(models, configured.batch_rules)
    env = command.child_environment(options.data_dir, options.bounds.most, models, configured, found)
    own = [command.worker_environment(number, command.gpus(env), env) for number in range(1, options.bounds.most + 1)]
    url, key = options.service
    with command.locked(options.data_dir / "pool"):
        crew = PoolProcesses(
            own, env, options.data_dir / "pool", command.tell, configured.drain_timeout_s + command.AFTER_DRAIN_S
        )
        async with AsyncClient(url, api_key=key, timeout_s=ASK_TIMEOUT_S, retries=0) as client:
            running = Pool(client, configured.namespace, crew, options.bounds, options.look_every_s, command.tell)
            with command.on_stop_signal(running.stop):
                try:
                    await running.run(report.told)
                finally:
                    report.close()
