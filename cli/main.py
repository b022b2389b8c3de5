"""The `fusequeue` command: its commands by name.

A module is imported when its command runs: with all of them, `fusequeue --help` took four times as long.
"""

import io
import sys
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

from cli.help_texts import Command, CommandGroup

OPTIONS: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}

COMMANDS = {
    "up": ("cli.processes:up", "Run everything on this machine: Redis, the API, workers and chores."),
    "api": ("cli.processes:api", "Run one API process."),
    "worker": ("cli.processes:worker", "Run one worker process."),
    "chores": ("cli.processes:chores", "Run one chores worker."),
    "probe": (
        "cli.processes:probe",
        "Measure time and memory per forward by rows, for each model.",
    ),
    "mcp": (
        "cli.mcp.command:mcp",
        "Serve the tools generate, status, result and batch to MCP clients.",
    ),
    "version": ("cli.processes:version", "Print the version."),
    "generate": ("cli.generate:generate", "Make images of prompts here, without a service, and save them."),
    "submit": ("cli.submit:submit", "Submit a job, wait with a progress bar, and save its images."),
    "backfill": ("cli.backfill.command:backfill", "Generate an image for each prompt of a file."),
    "pool": (
        "cli.pool.command:pool",
        "Run as many workers on this machine as the service wants.",
    ),
    "watch": ("cli.submit:watch", "Show a job's progress until it ends; with --json, print each event on a line."),
    "status": (
        "cli.jobs:status",
        "Show a job: its state and, while it is queued, its position.",
    ),
    "jobs": ("cli.jobs:jobs", "List jobs, newest first."),
    "batches": (
        "cli.batches:batches",
        "List batches with their progress and the time left, or show one.",
    ),
    "groups": (
        "cli.groups:groups",
        "List groups of jobs; show one, and pause, resume, cancel, retry, delete and download all its jobs.",
    ),
    "cancel": (
        "cli.matching:cancel",
        "Cancel jobs, by id or all that match: queued ones at once, running ones at their next step.",
    ),
    "update": ("cli.matching:update", "Change the priority or the deadline of queued jobs, by id or all that match."),
    "retry": (
        "cli.matching:retry",
        "Queue failed, canceled and expired jobs again as new jobs, by id or all that match.",
    ),
    "delete": ("cli.matching:delete", "Delete ended jobs and their images, by id or all that match."),
    "models": ("cli.models:models", "List the models of the service; load, unload, pin and unpin them on workers."),
    "adapters": (
        "cli.adapters:adapters",
        "List uploaded LoRA adapters and embeddings, newest first; upload, show and delete them.",
    ),
    "webhooks": (
        "cli.webhooks.command:webhooks",
        "Receive the webhooks of a service on this machine, for development.",
    ),
    "queues": ("cli.jobs:queues", "List queued and running jobs by signature, the longest queue first."),
    "workers": ("cli.jobs:workers", "List the workers that are alive."),
    "doctor": ("cli.doctor:doctor", "Check Redis, storage, models, API, device and memory with the current settings."),
    "pause": (
        "cli.operators.operations:pause",
        "Pause jobs; or, as an operator, start no job of a model, of a tenant, or at all.",
    ),
    "resume": (
        "cli.operators.operations:resume",
        "End the pauses of jobs, or one of a model, of a tenant, or of everything.",
    ),
    "pauses": ("cli.operators.operations:pauses", "List what is paused."),
    "curves": ("cli.operators.operations:curves", "List the batch cost curves that workers measured."),
    "usage": (
        "cli.operators.operations:usage",
        "List what jobs have used, by day, tenant and model.",
    ),
    "actions": ("cli.operators.operations:actions", "List what operators did, newest first."),
    "backup": (
        "cli.backup.command:backup",
        "Write the Redis data and the storage of a `fusequeue up` to a file, also while it runs.",
    ),
    "restore": ("cli.backup.command:restore", "Restore a backup to a new folder for `fusequeue up`."),
    "keys": ("cli.operators.keys:keys", "List API keys, with the time of their last use; create and revoke them."),
    "tenants": (
        "cli.operators.keys:tenants",
        "List the tenants that have keys, limits or jobs, with what they keep and use; change their limits.",
    ),
    "dead": (
        "cli.operators.dead_letters:dead",
        "List dead letters, the jobs that failed permanently, newest first; show, redrive and purge them.",
    ),
}
"""Where each command is, and how its help begins."""


class Commands(TyperGroup):
    """The commands of `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def load(name: str) -> Any:
    """Import a command."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(module), attribute)
    parent = typer.Typer(**OPTIONS)
    parent.callback()(lambda: None)  # a group, although of one command
    if isinstance(found, typer.Typer):
        for command in found.registered_commands:
            command.cls = Command
        parent.add_typer(found, name=name, cls=CommandGroup)
    else:
        parent.command(name, cls=Command)(found)
    return cast(TyperGroup, get_command(parent)).commands[name]


app = typer.Typer(cls=Commands, no_args_is_help=True, **(OPTIONS | {"add_completion": True}))


def _print_version(value: bool) -> None:
    if value:
        from shared.runtime.clock import VERSION

        print(VERSION)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A job service for diffusion models: `fusequeue up` starts it, `fusequeue submit` uses it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that the terminal's encoding lacks are printed as escapes.
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    app()
