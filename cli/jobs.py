"""Commands for one's own jobs: submit, watch, list, cancel."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cli.backfill.prompts import value_of
from cli.client_options import Json, Key, Url, connected
from cli.output import CommandConsole
from fusequeue import Client, Event, Job

JobId = Annotated[str, typer.Argument(help="The job's id.")]


def submit(
    prompt: Annotated[str, typer.Argument(help="What the picture shows.")],
    model: Annotated[str, typer.Option(help="A model of `fusequeue models`.")] = "demo",
    image: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Start from, or edit, this picture; again for several."),
    ] = None,
    mask: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="White where the image is repainted.")
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="NAME=VALUE", help="Any field of the request, e.g. -s steps=20 -s seed=7."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", file_okay=False, help="Where pictures are saved.")] = Path(
        "."
    ),
    wait: Annotated[bool, typer.Option(help="Wait for the result and save it.")] = True,
    show: Annotated[bool, typer.Option("--show", help="Open the result.")] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0, help="Give up waiting after so many seconds.")
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Submit a job, wait with a progress bar, and save what it makes."""
    fields = {**_pictures(image or [], mask), **fields_of(field or [])}
    with connected(url, api_key, as_json) as (client, screen):
        job = client.submit(model, prompt, **fields)
        if not wait:
            _tell(screen, job)
            return
        try:
            job = _follow(client, screen, job.id, timeout_s).require_success()
        except KeyboardInterrupt:
            screen.err.print(f"job {job.id} goes on; `fusequeue cancel {job.id}` ends it")
            raise
        files = client.download(job, output)
        _tell(screen, job, files)
        for file in files if show else ():
            webbrowser.open(file.resolve().as_uri())


def watch(job_id: JobId, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Follow a job until it has ended; with --json, print each of its events as a line."""
    with connected(url, api_key, as_json) as (client, screen):
        job = _follow(client, screen, job_id, None)
        if not as_json:
            _tell(screen, job)
        job.require_success()


def jobs(
    status: Annotated[str | None, typer.Option(help="One or more states, by commas.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model's.")] = None,
    batch: Annotated[str | None, typer.Option(help="Only this batch's.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 20,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    with connected(url, api_key, as_json) as (client, screen):
        found = client.jobs(limit=limit, status=status, model=model, batch_id=batch)
        columns = ("id", "status", "model", "progress", "created", "prompt")
        screen.table(((job, _row(job)) for job in found), columns)


def cancel(
    job_ids: Annotated[list[str], typer.Argument(help="Jobs to cancel.")],
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Cancel jobs: at once while they wait, at their next step while they run."""
    with connected(url, api_key, as_json) as (client, screen):
        screen.table(((job, (job.id, job.status)) for job in map(client.cancel, job_ids)), ("id", "status"))


def _pictures(images: Sequence[Path], mask: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if images:
        found["image" if len(images) == 1 else "images"] = images[0] if len(images) == 1 else list(images)
    if mask is not None:
        found["mask"] = mask
    return found


def fields_of(settings: Sequence[str]) -> dict[str, Any]:
    """Read NAME=VALUE words as fields of a request."""
    made: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{setting!r} is not NAME=VALUE", param_hint="--set")
        made[name] = value_of(name, text)
    return made


def _follow(client: Client, screen: CommandConsole, job_id: str, timeout_s: float | None) -> Job:
    if timeout_s is not None:
        return client.wait(job_id, timeout_s=timeout_s)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[steps]}"), TimeElapsedColumn())
    with Progress(*columns, console=screen.err, disable=screen.as_json or not screen.err.is_terminal) as bar:
        task = bar.add_task("queued", total=None, steps="")
        for event in client.events(job_id):
            if screen.as_json and event.job is None:
                screen.one(event, ())
            bar.update(task, **_shown(event))
            if event.job is not None:
                return event.job
    raise AssertionError("events end with the job's end")


def _shown(event: Event) -> dict[str, Any]:
    progress = event.progress
    return {
        "description": event.phase or event.status,
        "completed": progress.step,
        "total": progress.total or None,
        "steps": f"{progress.step}/{progress.total}" if progress.total else "",
    }


def _row(job: Job) -> tuple[object, ...]:
    words = job.prompt if len(job.prompt) <= 60 else f"{job.prompt[:59]}…"
    percent = f"{job.progress.percent}%" if job.status == "running" else ""
    return job.id, job.status, job.model, percent, f"{job.created_at:%Y-%m-%d %H:%M:%S}", words


def _tell(screen: CommandConsole, job: Job, files: Sequence[Path] = ()) -> None:
    error = None if job.error is None else f"{job.error.message} ({job.error.code})"
    lines = (
        ("job", job.id),
        ("status", job.status),
        ("seed", job.seed),
        ("error", error),
        ("solo", None if job.batching is None else job.batching.solo_reason),
        *(("saved", file) for file in files),
    )
    value = {**job.model_dump(mode="json"), "files": [str(file) for file in files]} if files else job
    screen.one(value, [line for line in lines if line[1] not in (None, "")])
