"""Commands that ask the service about itself: models, queues, workers, dead letters."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.client_options import Json, Key, Url, connected

dead = typer.Typer(no_args_is_help=True, help="Jobs that were given up: list, show, redrive, purge.")
LetterIds = Annotated[list[str], typer.Argument(help="Dead letters, by their jobs' ids.")]


def models(url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List the models that jobs may ask for."""
    with connected(url, api_key, as_json) as (client, screen):
        rows = (
            (
                one,
                (
                    one["id"],
                    one["tasks"],
                    f"{one['defaults']['width']}x{one['defaults']['height']}",
                    one["defaults"]["steps"],
                    one["max_batch"],
                ),
            )
            for one in client.models()
        )
        screen.table(rows, ("id", "tasks", "size", "steps", "max batch"))


def queues(url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List what waits and runs, signature by signature, the longest lines first."""
    with connected(url, api_key, as_json) as (client, screen):
        rows = (
            (
                one,
                (
                    one["signature"],
                    one["model"],
                    sum(one["jobs"].values()),
                    one["running_jobs"],
                    f"{one['oldest_age_ms'] / 1000:.1f} s",
                ),
            )
            for one in client.queues()
        )
        screen.table(rows, ("signature", "model", "waiting", "running", "oldest"))


def workers(url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List the workers that are alive."""
    with connected(url, api_key, as_json) as (client, screen):
        rows = (
            (
                one,
                (
                    one["id"],
                    one["device"],
                    one["models"],
                    f"{one['forward_rows'] / one['forwards']:.1f}" if one["forwards"] else "",
                ),
            )
            for one in client.workers()
        )
        screen.table(rows, ("id", "device", "models", "rows per forward"))


@dead.command("list")
def list_dead(
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 20,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """List them, newest first."""
    with connected(url, api_key, as_json) as (client, screen):
        letters = client.dead_letters(limit=limit)
        rows = ((one, (one.id, one.reason, one.at and f"{one.at:%Y-%m-%d %H:%M:%S}", one.detail)) for one in letters)
        screen.table(rows, ("id", "reason", "at", "detail"))


@dead.command()
def show(letter_id: str, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Show one with its job."""
    with connected(url, api_key, as_json) as (client, screen):
        letter = client.dead_letter(letter_id)
        job = letter.job
        about = () if job is None else (("model", job.model), ("prompt", job.prompt), ("status", job.status))
        screen.one(letter, (("id", letter.id), ("reason", letter.reason), ("detail", letter.detail), *about))


@dead.command()
def redrive(letter_ids: LetterIds, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Put their jobs back in line, their attempts forgotten."""
    with connected(url, api_key, as_json) as (client, screen):
        for letter_id in letter_ids:
            client.redrive(letter_id)
            screen.one({"id": letter_id, "redriven": True}, ((letter_id, "back in line"),))


@dead.command()
def purge(letter_ids: LetterIds, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Delete them, and the records of their jobs."""
    with connected(url, api_key, as_json) as (client, screen):
        for letter_id in letter_ids:
            client.purge(letter_id)
            screen.one({"id": letter_id, "purged": True}, ((letter_id, "deleted"),))
