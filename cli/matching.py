"""Commands that change jobs, those named or all that match filters: cancel, update, retry and delete."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import typer

from cli.client_options import (
    Chosen,
    CommandConsole,
    Json,
    Key,
    Url,
    connected,
    finite_option,
    for_each,
    ids_option,
    name_option,
    takes,
)
from cli.messages import counted
from fusequeue import Changes, Job

JobIds = Annotated[list[str] | None, typer.Argument(help="Jobs; or name filters.", callback=ids_option)]
TIME = "ISO 8601 or epoch seconds"
_METADATA = "Only jobs with this metadata; repeat it for several."
DRY_RUN = Annotated[bool | None, typer.Option("--dry-run", help="Change nothing: count what would change.")]
JOB_FILTERS: dict[str, Any] = {
    "status": Annotated[str | None, typer.Option(help="States, separated by commas.", callback=name_option)],
    "model": Annotated[str | None, typer.Option(help="Only jobs of this model.", callback=name_option)],
    "batch_id": Annotated[str | None, typer.Option("--batch", help="Only jobs of this batch.", callback=name_option)],
    "group": Annotated[str | None, typer.Option(help="Only jobs of this group.", callback=name_option)],
    "parent": Annotated[
        str | None, typer.Option(metavar="ID", help="Only jobs that wait or waited for it.", callback=name_option)
    ],
    "prompt": Annotated[str | None, typer.Option(help="A part of their prompts, in any case.", callback=name_option)],
    "metadata": Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help=_METADATA, callback=name_option)],
    "created_after": Annotated[str | None, typer.Option(help=f"{TIME}; inclusive.", callback=name_option)],
    "created_before": Annotated[str | None, typer.Option(help=f"{TIME}; exclusive.", callback=name_option)],
    "tenant": Annotated[str | None, typer.Option(help="Its jobs, as an operator.", callback=name_option)],
}
JOB_CHANGES = {**JOB_FILTERS, "dry_run": DRY_RUN}


@takes(JOB_CHANGES)
def cancel(chosen: Chosen, job_ids: JobIds = None, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Cancel jobs, by id or all that match: queued ones at once, running ones at their next step."""
    with connected(url, api_key, as_json) as (client, console):
        if job_ids:
            _change_each(console, job_ids, chosen, client.cancel)
        else:
            change_all(console, client.matching.cancel, chosen, "canceled", "jobs")


@takes(JOB_CHANGES)
def update(
    chosen: Chosen,
    job_ids: JobIds = None,
    priority: Annotated[str | None, typer.Option(help="interactive, standard or bulk.", callback=name_option)] = None,
    deadline: Annotated[
        float | None, typer.Option(min=0, help="Expire in this many seconds.", callback=finite_option)
    ] = None,
    no_deadline: Annotated[bool, typer.Option("--no-deadline", help="Remove the deadline.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Change the priority or the deadline of queued jobs, by id or all that match."""
    values: dict[str, Any] = {"priority": priority, "deadline_s": deadline, "remove_deadline": no_deadline}
    with connected(url, api_key, as_json) as (client, console):
        if job_ids:
            _change_each(console, job_ids, chosen, partial(client.update, **values))
        else:
            change_all(console, partial(client.matching.update, **values), chosen, "updated", "jobs")


@takes(JOB_CHANGES)
def retry(chosen: Chosen, job_ids: JobIds = None, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Queue failed, canceled and expired jobs again as new jobs, by id or all that match."""
    with connected(url, api_key, as_json) as (client, console):
        if job_ids:
            _change_each(console, job_ids, chosen, client.retry)
        else:
            change_all(console, client.matching.retry, chosen, "retried", "jobs")


@takes(JOB_CHANGES)
def delete(chosen: Chosen, job_ids: JobIds = None, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Delete ended jobs and their images, by id or all that match."""
    with connected(url, api_key, as_json) as (client, console):

        def delete_one(job_id: str) -> None:
            client.delete(job_id)
            console.record({"id": job_id, "deleted": True}, ((job_id, "deleted"),))

        if job_ids:
            require_no_filters(chosen)
            for_each(job_ids, delete_one)
        else:
            change_all(console, client.matching.delete, chosen, "deleted", "jobs")


def _change_each(console: CommandConsole, job_ids: list[str], chosen: Chosen, change: Callable[[str], Job]) -> None:
    require_no_filters(chosen)

    def change_one(job_id: str) -> None:
        job = change(job_id)
        console.record(job, ((job.id, job.status),))

    for_each(job_ids, change_one)


def require_no_filters(chosen: Chosen) -> None:
    """Raise `BadParameter` for filters beside ids."""
    if chosen:
        raise typer.BadParameter(f"name ids or filters, not both: {', '.join(chosen)}")


def change_all(console: CommandConsole, change: Callable[..., Changes], chosen: Chosen, done: str, noun: str) -> None:
    """Change all that match, and print how many; raises `BadParameter` without a filter."""
    if not chosen.keys() - {"dry_run"}:
        raise typer.BadParameter(f"name {noun} by id, or filters, which `--help` lists")
    print_changes(console, change(**filters_of(chosen)), done, noun)


def print_changes(console: CommandConsole, changes: Changes, done: str, noun: str) -> None:
    """Print how many were changed; those that match and cannot be are unchanged."""
    verb = f"would be {done}" if changes.dry_run else done
    console.record(
        changes,
        ((verb, counted(len(changes.ids), noun)), *((("unchanged", changes.skipped),) if changes.skipped else ())),
    )


def filters_of(chosen: Chosen) -> dict[str, Any]:
    """Return filters as the client takes them."""
    return {**chosen, "metadata": parse_pairs(chosen["metadata"])} if "metadata" in chosen else dict(chosen)


def parse_pairs(texts: Iterable[str]) -> dict[str, str]:
    """Return the values of `KEY=VALUE` texts by key, or raise `BadParameter`."""
    pairs: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"{text[:80]!r} is not KEY=VALUE", param_hint="'--metadata'")
        if key in pairs:
            raise typer.BadParameter(f"{key[:80]} has two values; give it one", param_hint="'--metadata'")
        pairs[key] = value
    return pairs
