"""Commands of groups: their progress, changes of all their jobs, and the files of those that have succeeded."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cli.client_options import Json, Key, Url, connected, name_option
from cli.jobs import Limit
from cli.matching import print_changes
from cli.messages import counted
from fusequeue import Changes, Client, Group, JobState

groups = typer.Typer(invoke_without_command=True)

COLUMNS = ("name", "ended", "failed", "running", "queued", "paused", "per minute", "time left", "last submit")
RETRIED: tuple[JobState, ...] = ("failed", "expired")

Name = Annotated[str, typer.Argument(metavar="NAME", help="A group of `fusequeue groups`.", callback=name_option)]
OfTenant = Annotated[
    str | None, typer.Option("--tenant", help="Its groups, for keys with the scope admin.", callback=name_option)
]


@groups.callback()
def list_groups(
    context: typer.Context,
    limit: Limit = 20,
    tenant: OfTenant = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """List groups of jobs; show one, and pause, resume, cancel, retry, delete and download all its jobs."""
    if context.invoked_subcommand is None:
        with connected(url, api_key, as_json) as (client, console):
            console.table(client.groups(limit=limit, tenant=tenant), COLUMNS, group_row)


@groups.command()
def show(name: Name, tenant: OfTenant = None, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Show a group: its jobs by state, its rate, the time left and its device time."""
    with connected(url, api_key, as_json) as (client, console):
        group = client.group(name, tenant=tenant)
        rows = zip(COLUMNS, group_row(group), strict=True)
        console.record(group, (*rows, ("device seconds", f"{group.device_seconds:.1f}")))


@groups.command()
def pause(name: Name, tenant: OfTenant = None, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Pause all jobs of a group, also running ones, until `resume`; jobs that are submitted later run."""
    _change(name, tenant, "paused", (url, api_key, as_json), lambda client: client.matching.pause)


@groups.command()
def resume(name: Name, tenant: OfTenant = None, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """End the pauses of all jobs of a group."""
    _change(name, tenant, "resumed", (url, api_key, as_json), lambda client: client.matching.resume)


@groups.command()
def cancel(name: Name, tenant: OfTenant = None, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Cancel all jobs of a group: queued ones at once, running ones at their next step."""
    _change(name, tenant, "canceled", (url, api_key, as_json), lambda client: client.matching.cancel)


@groups.command()
def retry(name: Name, tenant: OfTenant = None, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Queue the failed and expired jobs of a group again, as new jobs of it; each once, also by a repetition."""
    _change(
        name, tenant, "retried", (url, api_key, as_json), lambda client: partial(client.matching.retry, status=RETRIED)
    )


@groups.command()
def delete(name: Name, tenant: OfTenant = None, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Delete the ended jobs of a group and their images; the group ends with its last job."""
    _change(name, tenant, "deleted", (url, api_key, as_json), lambda client: client.matching.delete)


@groups.command()
def download(
    name: Name,
    out: Annotated[Path, typer.Option("--out", "-o", file_okay=False, help="Folder for the files.")] = Path("."),
    tenant: OfTenant = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Save the files of a group's jobs that have succeeded; a repetition saves those that the folder lacks."""
    with connected(url, api_key, as_json) as (client, console):
        done = client.download_group(name, out, tenant=tenant)
        result = {"group": name, "saved": done.saved, "kept": done.kept, "folder": str(out)}
        console.record(result, (("saved", f"{counted(done.saved, 'files')} in {out}"), ("kept", done.kept)))


def _change(
    name: str,
    tenant: str | None,
    done: str,
    service: tuple[str | None, str | None, bool],
    change_of: Callable[[Client], Callable[..., Changes]],
) -> None:
    """Change the jobs of a group that exists, and print how many."""
    with connected(*service) as (client, console):
        changes = change_of(client)(group=name, tenant=tenant)
        if not changes.ids and not changes.skipped:
            client.group(name, tenant=tenant)  # an error if there is none
        print_changes(console, changes, done, "jobs")


def group_row(group: Group) -> tuple[object, ...]:
    """Return the cells of `COLUMNS`."""
    jobs = group.jobs
    left = "" if group.eta_s is None else str(timedelta(seconds=round(group.eta_s)))
    ended, last = f"{group.ended} of {group.total}", f"{group.last_submitted_at:%Y-%m-%d %H:%M:%S}"
    rate = f"{group.rate_per_minute:.1f}"
    return group.name, ended, jobs.failed, jobs.running, jobs.queued, jobs.paused, rate, left, last
