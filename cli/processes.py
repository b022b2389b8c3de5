"""Commands that run the processes of the service: up, api, worker, chores, probe; and version."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from shared.runtime.imports import importing

with importing():
    from cli.messages import print_error
    from cli.up import command as up_command
    from cli.worker_packages import require_worker_packages
    from shared.config import settings
    from shared.errors import FusequeueError
    from shared.runtime.clock import VERSION
    from shared.runtime.python_command import python_command

EXIT_CONFIGURATION = 2
INSECURE = "insecure-no-keys"
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=1, max=65_535, help="Port to listen on.")]
NoKeys = Annotated[bool, typer.Option("--insecure-no-keys", help="Require no API key, on any address.")]


def up(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    data_dir: Annotated[Path, typer.Option(help="Folder for Redis data, images and logs.")] = Path("data"),
    api_workers: Annotated[int, typer.Option(min=1, help="API processes on the port; each uses one core.")] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Worker processes; 0 to run them with `fusequeue pool`.")] = 1,
    models: Annotated[Path | None, typer.Option(help="Models file. Default: ./models.toml, else the demo's.")] = None,
    insecure_no_keys: NoKeys = False,
) -> None:
    """Run everything on this machine: Redis, the API, workers and chores. Ctrl-C drains and stops it."""
    if insecure_no_keys:
        os.environ["FUSEQUEUE_AUTH"] = INSECURE
    environ = {name: value for name, value in os.environ.items() if value or not name.startswith(settings.PREFIX)}
    for warning in settings.unknown_variables(environ):
        up_command.print_status(warning)
    try:
        config = settings.load()
        settings.withhold_permissions(config)
        status = asyncio.run(
            up_command.up(host, port, data_dir.resolve(), api_workers, workers, models, config, environ)
        )
    except FusequeueError as error:
        print_error(error.message)
        status = EXIT_CONFIGURATION
    raise typer.Exit(status)


def api(host: Host = "127.0.0.1", port: Port = 8000, insecure_no_keys: NoKeys = False) -> None:
    """Run one API process. On other addresses than the loopback it requires API keys."""
    if insecure_no_keys:
        os.environ["FUSEQUEUE_AUTH"] = INSECURE
    _exec("api", "--host", host, "--port", str(port))


def worker() -> None:
    """Run one worker process."""
    _exec_with_worker_packages("worker")


def chores() -> None:
    """Run one chores worker."""
    _exec("api.chores")


def probe(
    model: Annotated[list[str] | None, typer.Option(help="Measure only this model; repeat it for several.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the cost curves as an SVG image.")] = None,
    step_cache: Annotated[bool, typer.Option(help="Calibrate step caching instead.")] = False,
    prompt: Annotated[list[str] | None, typer.Option(help="Calibrate with this prompt; repeat it for several.")] = None,
    keep: Annotated[
        bool, typer.Option(help="Store the cost curves in Redis for the workers, or step schedules in the models file.")
    ] = True,
) -> None:
    """Measure time and memory per forward by rows, for each model on this machine's device."""
    models = [argument for name in model or () for argument in ("--model", name)]
    image = () if plot is None else ("--plot", str(plot))
    steps = ("--step-cache",) if step_cache else ()
    prompts = [argument for text in prompt or () for argument in ("--prompt", text)]
    _exec_with_worker_packages("worker.probe", *models, *image, *steps, *prompts, "--keep" if keep else "--no-keep")


def version() -> None:
    """Print the version."""
    print(VERSION)


def _exec_with_worker_packages(module: str, *arguments: str) -> None:
    try:
        require_worker_packages()
    except FusequeueError as error:
        print_error(error.message)
        raise typer.Exit(EXIT_CONFIGURATION) from None
    _exec(module, *arguments)


def _exec(module: str, *arguments: str) -> None:
    """Replace this process by `python -m module`."""
    command = python_command(module, *arguments)
    os.execv(command[0], command)
