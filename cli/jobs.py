"""Commands for jobs (submit, watch, jobs, cancel) and for the service (models, queues, workers, dead letters)."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cli.backfill.prompts import parse_field
from cli.client_options import CommandConsole, Fields, Json, Key, Url, connected
from fusequeue import Client, DeadLetter, Job

DEAD_HELP = "Dead letters, the jobs that failed permanently: list, show, redrive, purge."
dead = typer.Typer(no_args_is_help=True, help=DEAD_HELP)

JobId = Annotated[str, typer.Argument(help="Job id.")]
JobIds = Annotated[list[str], typer.Argument(help="Jobs to cancel.")]
LetterIds = Annotated[list[str], typer.Argument(help="Job ids of dead letters.")]
Limit = Annotated[int, typer.Option(min=1, help="How many, newest first.")]


def submit(
    prompt: Annotated[str, typer.Argument(help="What the image shows.")],
    model: Annotated[str, typer.Option(help="A model listed by `fusequeue models`.")] = "demo",
    image: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Image to start from or to edit; repeat it for several."),
    ] = None,
    mask: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Mask: white is repainted.")] = None,
    field: Fields = None,
    output: Annotated[Path, typer.Option("--output", "-o", file_okay=False, help="Folder for the images.")] = Path("."),
    wait: Annotated[bool, typer.Option(help="Wait for the result and save it.")] = True,
    show: Annotated[bool, typer.Option("--show", help="Open the result.")] = False,
    timeout_s: Annotated[float | None, typer.Option("--timeout", min=0, help="Most seconds to wait.")] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Submit a job, wait with a progress bar, and save its images."""
    fields: dict[str, Any] = {} if mask is None else {"mask": mask}
    if image:
        fields |= {"image": image[0]} if len(image) == 1 else {"images": image}
    fields |= parse_fields(field or [])
    with connected(url, api_key, as_json) as (client, console):
        job = client.submit(model, prompt, **fields)
        if not wait:
            _print_job(console, job)
            return
        try:
            job = _wait(client, console, job.id, timeout_s).require_success()
        except KeyboardInterrupt:
            console.err.print(f"job {job.id} continues; `fusequeue cancel {job.id}` cancels it")
            raise
        files = client.download(job, output)
        _print_job(console, job, files)
        for file in files if show else ():
            webbrowser.open(file.resolve().as_uri())


def watch(job_id: JobId, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Show a job's progress until it ends; with --json, print each event on a line."""
    with connected(url, api_key, as_json) as (client, console):
        job = _wait(client, console, job_id, None)
        if not as_json:
            _print_job(console, job)
        job.require_success()


def status(job_id: JobId, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Show a job: its state and, while it is queued, its position, why it waits and when it is expected to end."""
    with connected(url, api_key, as_json) as (client, console):
        _print_job(console, client.get(job_id))


def jobs(
    status: Annotated[str | None, typer.Option(help="Only these states, separated by commas.")] = None,
    model: Annotated[str | None, typer.Option(help="Only jobs of this model.")] = None,
    batch: Annotated[str | None, typer.Option(help="Only jobs of this batch.")] = None,
    limit: Limit = 20,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    with connected(url, api_key, as_json) as (client, console):
        listed = client.jobs(limit=limit, status=status, model=model, batch_id=batch)
        console.table(listed, ("id", "status", "model", "progress", "created", "prompt"), _row)


def cancel(job_ids: JobIds, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Cancel jobs: queued ones at once, running ones at their next step."""
    with connected(url, api_key, as_json) as (client, console):
        console.table(map(client.cancel, job_ids), ("id", "status"), lambda job: (job.id, job.status))


def models(url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List the models of the service."""
    with connected(url, api_key, as_json) as (client, console):
        console.table(client.models(), ("id", "tasks", "size", "steps", "max batch"), _model_row)


def queues(url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List queued and running jobs by signature, the longest queue first."""
    with connected(url, api_key, as_json) as (client, console):
        console.table(client.queues(), ("signature", "model", "queued", "running", "oldest"), _queue_row)


def workers(url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List the workers that are alive."""
    with connected(url, api_key, as_json) as (client, console):
        console.table(client.workers(), ("id", "device", "models", "rows per forward"), _worker_row)


@dead.command("list")
def list_dead(limit: Limit = 20, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """List dead letters, newest first."""
    with connected(url, api_key, as_json) as (client, console):
        console.table(client.dead_letters(limit=limit), ("id", "reason", "at", "detail"), _letter_row)


@dead.command()
def show(letter_id: str, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Show a dead letter and its job."""
    with connected(url, api_key, as_json) as (client, console):
        letter = client.dead_letter(letter_id)
        job = letter.job
        about = () if job is None else (("model", job.model), ("prompt", job.prompt), ("status", job.status))
        console.record(letter, (("id", letter.id), ("reason", letter.reason), ("detail", letter.detail), *about))


@dead.command()
def redrive(letter_ids: LetterIds, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Queue the jobs of dead letters again, with their attempts reset."""
    with connected(url, api_key, as_json) as (client, console):
        for letter_id in letter_ids:
            client.redrive(letter_id)
            console.record({"id": letter_id, "redriven": True}, ((letter_id, "queued"),))


@dead.command()
def purge(letter_ids: LetterIds, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Delete dead letters and the records of their jobs."""
    with connected(url, api_key, as_json) as (client, console):
        for letter_id in letter_ids:
            client.purge(letter_id)
            console.record({"id": letter_id, "purged": True}, ((letter_id, "deleted"),))


def parse_fields(assignments: Sequence[str]) -> dict[str, Any]:
    """Return request fields from NAME=VALUE options."""
    fields: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{assignment!r} is not NAME=VALUE", param_hint="--set")
        fields[name] = parse_field(name, text)
    return fields


def _wait(client: Client, console: CommandConsole, job_id: str, timeout_s: float | None) -> Job:
    if timeout_s is not None:
        return client.wait(job_id, timeout_s=timeout_s)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[steps]}"), TimeElapsedColumn())
    quiet = console.as_json or not console.err.is_terminal
    with Progress(*columns, console=console.err, disable=quiet) as bar:
        task = bar.add_task("queued", total=None, steps="")
        for event in client.events(job_id):
            if console.as_json and event.job is None:
                console.record(event, ())
            step, total = event.progress.step, event.progress.total
            steps = f"{step}/{total}" if total else ""
            bar.update(task, description=event.phase or event.status, completed=step, total=total or None, steps=steps)
            if event.job is not None:
                return event.job
    raise AssertionError("the event stream ends with the job's final event")


def _print_job(console: CommandConsole, job: Job, files: Sequence[Path] = ()) -> None:
    lines: list[tuple[str, object]] = [("job", job.id), ("status", job.status), ("seed", job.seed)]
    if job.queue is not None:
        lines += [("position", job.queue.position), ("reason", job.queue.reason), ("seconds left", job.queue.eta_s)]
    if job.error is not None:
        lines.append(("error", f"{job.error.message} ({job.error.code})"))
    if job.batching is not None and job.batching.solo_reason:
        lines.append(("solo", job.batching.solo_reason))
    if job.metrics.device_seconds is not None:
        lines.append(("device seconds", job.metrics.device_seconds))
    lines += [("saved", file) for file in files]
    value = {**job.model_dump(mode="json"), "files": [str(file) for file in files]} if files else job
    console.record(value, lines)


def _row(job: Job) -> tuple[object, ...]:
    prompt = job.prompt if len(job.prompt) <= 60 else f"{job.prompt[:59]}…"
    percent = f"{job.progress.percent}%" if job.status == "running" else ""
    return job.id, job.status, job.model, percent, f"{job.created_at:%Y-%m-%d %H:%M:%S}", prompt


def _letter_row(letter: DeadLetter) -> tuple[object, ...]:
    return letter.id, letter.reason, letter.at and f"{letter.at:%Y-%m-%d %H:%M:%S}", letter.detail


def _model_row(model: dict[str, Any]) -> tuple[object, ...]:
    defaults = model["defaults"]
    size = f"{defaults['width']}x{defaults['height']}"
    return model["id"], model["tasks"], size, defaults["steps"], model["max_batch"]


def _queue_row(queue: dict[str, Any]) -> tuple[object, ...]:
    oldest = f"{queue['oldest_age_ms'] / 1000:.1f} s"
    return queue["signature"], queue["model"], sum(queue["jobs"].values()), queue["running_jobs"], oldest


def _worker_row(worker: dict[str, Any]) -> tuple[object, ...]:
    rows = f"{worker['forward_rows'] / worker['forwards']:.1f}" if worker["forwards"] else ""
    return worker["id"], worker["device"], worker["models"], rows
