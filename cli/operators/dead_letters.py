"""Commands of dead letters: list, show, redrive and purge them."""

from typing import Annotated, Any

import typer

from cli.client_options import Chosen, Json, Key, Url, connected, for_each, ids_option, name_option, takes
from cli.jobs import Limit
from cli.matching import DRY_RUN, TIME, change_all, require_no_filters
from cli.submit import JobId
from fusequeue import DeadLetter

dead = typer.Typer(invoke_without_command=True)

COLUMNS = ("id", "reason", "at", "detail")

LetterIds = Annotated[list[str] | None, typer.Argument(help="Dead letters; or name filters.", callback=ids_option)]
LETTER_FILTERS: dict[str, Any] = {
    "tenant": Annotated[str | None, typer.Option(help="Only jobs of this tenant.", callback=name_option)],
    "model": Annotated[str | None, typer.Option(help="Only jobs of this model.", callback=name_option)],
    "reason": Annotated[str | None, typer.Option(help="Such as worker_lost.", callback=name_option)],
    "at_after": Annotated[str | None, typer.Option(help=f"{TIME}; inclusive.", callback=name_option)],
    "at_before": Annotated[str | None, typer.Option(help=f"{TIME}; exclusive.", callback=name_option)],
}
LETTER_CHANGES = {**LETTER_FILTERS, "dry_run": DRY_RUN}


@dead.callback()
@takes(LETTER_FILTERS)
def list_dead(
    context: typer.Context,
    chosen: Chosen,
    limit: Limit = 20,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """List dead letters, the jobs that failed permanently, newest first; show, redrive and purge them."""
    if context.invoked_subcommand is None:
        with connected(url, api_key, as_json) as (client, console):
            console.table(client.dead_letters(limit=limit, **chosen), COLUMNS, _letter_row)


@dead.command()
def show(letter_id: JobId, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Show a dead letter and its job."""
    with connected(url, api_key, as_json) as (client, console):
        letter = client.dead_letter(letter_id)
        job = letter.job
        about = () if job is None else (("model", job.model), ("prompt", job.prompt), ("status", job.status))
        console.record(letter, (("id", letter.id), ("reason", letter.reason), ("detail", letter.detail), *about))


@dead.command()
@takes(LETTER_CHANGES)
def redrive(
    chosen: Chosen, letter_ids: LetterIds = None, url: Url = None, api_key: Key = None, as_json: Json = False
) -> None:
    """Queue the jobs of dead letters again, by id or all that match, with their attempts reset."""
    with connected(url, api_key, as_json) as (client, console):

        def redrive_one(letter_id: str) -> None:
            client.redrive(letter_id)
            console.record({"id": letter_id, "redriven": True}, ((letter_id, "queued"),))

        if letter_ids:
            require_no_filters(chosen)
            for_each(letter_ids, redrive_one)
        else:
            change_all(console, client.matching.redrive, chosen, "queued again", "dead letters")


@dead.command()
@takes(LETTER_CHANGES)
def purge(
    chosen: Chosen, letter_ids: LetterIds = None, url: Url = None, api_key: Key = None, as_json: Json = False
) -> None:
    """Delete dead letters, by id or all that match, and the records of their jobs."""
    with connected(url, api_key, as_json) as (client, console):

        def purge_one(letter_id: str) -> None:
            client.purge(letter_id)
            console.record({"id": letter_id, "purged": True}, ((letter_id, "deleted"),))

        if letter_ids:
            require_no_filters(chosen)
            for_each(letter_ids, purge_one)
        else:
            change_all(console, client.matching.purge, chosen, "deleted", "dead letters")


def _letter_row(letter: DeadLetter) -> tuple[object, ...]:
    return letter.id, letter.reason, letter.at and f"{letter.at:%Y-%m-%d %H:%M:%S}", letter.detail
