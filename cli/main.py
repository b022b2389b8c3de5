"""The command line of fusequeue."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cli import jobs, keys, service
from cli.backfill.command import backfill
from cli.doctor import doctor
from cli.pool.command import pool
from cli.up import command as running
from shared.config import settings
from shared.errors import FusequeueError
from shared.runtime.version import VERSION

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

app.add_typer(keys.keys, name="keys")
app.add_typer(keys.tenants, name="tenants")

EXIT_CONFIGURATION = 2
INSECURE = "insecure-no-keys"
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=1, max=65_535, help="Port to listen on.")]
NoKeys = Annotated[bool, typer.Option("--insecure-no-keys", help="Ask nobody for an API key, on any address.")]


@app.command()
def up(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    data_dir: Annotated[Path, typer.Option(help="Where Redis, pictures and logs live.")] = Path("data"),
    workers: Annotated[int, typer.Option(min=0, help="Worker processes; 0 leaves them to `fusequeue pool`.")] = 1,
    models: Annotated[Path | None, typer.Option(help="The models file. Unset: ./models.toml, or the demo's.")] = None,
    insecure_no_keys: NoKeys = False,
) -> None:
    """Run everything on this machine: Redis, the API, workers and chores. Ctrl-C drains and stops it."""
    options = running.Options(host=host, port=port, data_dir=data_dir.resolve(), workers=workers, models=models)
    if insecure_no_keys:
        os.environ["FUSEQUEUE_AUTH"] = INSECURE
    environ = {name: value for name, value in os.environ.items() if value or not name.startswith(settings.PREFIX)}
    for told in settings.unknown_variables(environ):
        running.tell(told)
    try:
        status = asyncio.run(running.up(options, settings.load(), environ))
    except FusequeueError as error:
        running.tell(f"fusequeue: {error.message}")
        status = EXIT_CONFIGURATION
    raise typer.Exit(status)


@app.command()
def api(host: Host = "127.0.0.1", port: Port = 8000, insecure_no_keys: NoKeys = False) -> None:
    """Run one API process. Off the loopback it asks for API keys."""
    if insecure_no_keys:
        os.environ["FUSEQUEUE_AUTH"] = INSECURE
    _become("api", "--host", host, "--port", str(port))


@app.command()
def worker() -> None:
    """Run one worker process."""
    _become("worker")


@app.command()
def chores() -> None:
    """Run one chores worker."""
    _become("worker.chores")


@app.command()
def probe(
    model: Annotated[
        list[str] | None, typer.Option(help="Measure this model alone; may be given several times.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curves as an SVG picture.")] = None,
    keep: Annotated[bool, typer.Option(help="Write the curves to Redis, where workers find them.")] = True,
) -> None:
    """Measure seconds and memory by rows of a forward, for each model on this machine's device."""
    models = [part for name in model or () for part in ("--model", name)]
    picture = () if plot is None else ("--plot", str(plot))
    _become("worker.probe", *models, *picture, "--keep" if keep else "--no-keep")


@app.command()
def version() -> None:
    """Print the version."""
    print(VERSION)


for command in (
    jobs.submit,
    backfill,
    pool,
    jobs.watch,
    jobs.jobs,
    jobs.cancel,
    service.models,
    service.queues,
    service.workers,
    doctor,
):
    app.command()(command)
app.add_typer(service.dead, name="dead")


def _become(module: str, *arguments: str) -> None:
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


if __name__ == "__main__":
    app()
