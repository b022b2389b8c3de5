"""Commands that submit a job and wait for it."""

import re
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cli.backfill.prompts import parse_field
from cli.client_options import (
    CommandConsole,
    Fields,
    Json,
    Key,
    Url,
    connected,
    finite_option,
    is_text,
    name_option,
    text_option,
)
from cli.messages import print_error
from fusequeue import (
    Client,
    ClientError,
    Event,
    Job,
    JobParams,
    OnDeadlineName,
    OutputParams,
    RefusedError,
    UnexpectedResponse,
    Unreachable,
)

JobId = Annotated[str, typer.Argument(help="Job id.", callback=name_option)]


def submit(
    prompt: Annotated[str, typer.Argument(help="What the image shows.", callback=text_option)],
    model: Annotated[str, typer.Option(help="A model listed by `fusequeue models`.", callback=text_option)] = "demo",
    image: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="Image to start from or to edit; repeat it for several."),
    ] = None,
    mask: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Mask: white is repainted.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: a random one, which is printed.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    size: Annotated[str | None, typer.Option(metavar="WIDTHxHEIGHT", help="Pixels, such as 512x768.")] = None,
    n: Annotated[int | None, typer.Option("-n", help="Number of images; image i uses seed + i.")] = None,
    negative: Annotated[str | None, typer.Option(help="What the image does not show.", callback=text_option)] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.", callback=finite_option)] = None,
    deadline: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="The job is to end within this time.", callback=finite_option),
    ] = None,
    on_deadline: Annotated[
        OnDeadlineName | None, typer.Option(help="When that is no longer possible: expire it at once, or run it late.")
    ] = None,
    field: Fields = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            file_okay=False,
            writable=True,
            help="Folder for the images. Default: this one, or none where they go elsewhere.",
        ),
    ] = None,
    output_url: Annotated[
        list[str] | None,
        typer.Option(help="Presigned URL that gets an image with a PUT; repeat it for several.", callback=text_option),
    ] = None,
    output_bucket: Annotated[
        str | None, typer.Option(metavar="BUCKET[/PREFIX]", help="Bucket for the images.", callback=text_option)
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait for the result and save it.")] = True,
    show: Annotated[bool, typer.Option("--show", help="Open the result.")] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0, help="Most seconds to wait.", callback=finite_option)
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Submit a job, wait with a progress bar, and save its images."""
    width, height = parse_size(size)
    params: JobParams = {
        "image": image[0] if image and len(image) == 1 else None,
        "images": image if image and len(image) > 1 else None,
        "mask": mask,
        "seed": seed,
        "steps": steps,
        "width": width,
        "height": height,
        "n": n,
        "negative_prompt": negative,
        "guidance_scale": guidance,
        "deadline_s": deadline,
        "on_deadline": on_deadline,
        "output": parse_destination(output_url or [], output_bucket),
    }
    fields = parse_fields(field or [])
    with connected(url, api_key, as_json) as (client, console):
        job = client.submit(model, prompt, extra_body=fields, **params)
        if not wait:
            print_job(console, job)
            return
        try:
            job = _wait(client, console, job, timeout_s)
        except KeyboardInterrupt:
            console.err.print(f"job {job.id} continues; `fusequeue cancel {job.id}` cancels it")
            raise
        except (RefusedError, Unreachable, UnexpectedResponse):
            print_error(f"job {job.id} is submitted; `fusequeue watch {job.id}` waits for it again")
            raise
        if job.status != "succeeded":
            print_job(console, job)
        job.require_success()
        try:
            saves = output is not None or job.output is None
            files = client.download(job, output or Path(".")) if saves else []
        except (OSError, ClientError):
            where = f"`fusequeue watch {job.id} --json` has their URLs"
            print_error(f"job {job.id} succeeded; its images are not saved; {where}")
            raise
        print_job(console, job, files)
        for file in files if show else ():
            webbrowser.open(file.resolve().as_uri())


def watch(job_id: JobId, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Show a job's progress until it ends; with --json, print each event on a line, and the ended job."""
    with connected(url, api_key, as_json) as (client, console):
        job = _wait(client, console, job_id, None)
        print_job(console, job)
        job.require_success()


def parse_fields(assignments: Sequence[str]) -> dict[str, Any]:
    """Return request fields from NAME=VALUE options."""
    fields: dict[str, Any] = {}
    faults = []
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            faults.append(f"{assignment[:80]!r} is not NAME=VALUE")
        elif not is_text(assignment):
            faults.append(f"{assignment[:80]!r} is not UTF-8")
        else:
            fields[name] = parse_field(name, text)
    if faults:
        raise typer.BadParameter("; ".join(faults), param_hint="'--set'")
    return fields


def parse_destination(urls: Sequence[str], bucket: str | None) -> OutputParams | None:
    """Return where the images go; None without an option for it."""
    if urls and bucket is not None:
        raise typer.BadParameter("send either it or --output-bucket", param_hint="'--output-url'")
    if bucket is None:
        return {"put_urls": urls} if urls else None
    name, _, prefix = bucket.partition("/")
    return {"bucket": name, "prefix": prefix} if prefix else {"bucket": name}


def parse_size(size: str | None) -> tuple[int | None, int | None]:
    """Return width and height; None without a size."""
    if size is None:
        return None, None
    match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", size)
    if match is None:
        raise typer.BadParameter(f"{size[:80]!r} is not WIDTHxHEIGHT, such as 512x768", param_hint="'--size'")
    return int(match[1]), int(match[2])


def _wait(client: Client, console: CommandConsole, job: Job | str, timeout_s: float | None) -> Job:
    """Return the ended job; shows its progress, as JSON a line for each event but the last."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[steps]}"), TimeElapsedColumn())
    quiet = console.as_json or not console.err.is_terminal
    with Progress(*columns, console=console.err, disable=quiet) as bar:
        task = bar.add_task("queued", total=None, steps="")

        def show(event: Event) -> None:
            if console.as_json and event.job is None:
                console.record(event, ())
            step, total = event.progress.step, event.progress.total
            steps = f"{step}/{total}" if total else ""
            bar.update(task, description=event.phase or event.status, completed=step, total=total or None, steps=steps)

        return client.wait(job, timeout_s=timeout_s, on_progress=show)


def print_job(console: CommandConsole, job: Job, files: Sequence[Path] = ()) -> None:
    """Print a job and where its results are."""
    lines: list[tuple[str, object]] = [("job", job.id), ("status", job.status), ("seed", job.seed)]
    if job.queue is not None:
        lines += [("position", job.queue.position), ("reason", job.queue.reason), ("seconds left", job.queue.eta_s)]
    if job.error is not None:
        lines.append(("error", f"{job.error.message} ({job.error.code})"))
    lines += [("warning", warning.message) for warning in job.warnings]
    if job.flagged:
        lines.append(("flagged", f"{', '.join(map(str, job.flagged))}, by the model's safety checker"))
    if job.batching is not None and job.batching.solo_reason:
        lines.append(("solo", job.batching.solo_reason))
    if job.metrics.device_seconds is not None:
        lines.append(("device seconds", job.metrics.device_seconds))
    lines += [("at", artifact.location) for artifact in job.artifacts if artifact.location is not None]
    lines += [("saved", file) for file in files]
    value = {**job.model_dump(mode="json"), "files": [str(file) for file in files]} if files else job
    console.record(value, lines)
