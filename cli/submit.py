"""Commands that submit a job and wait for it."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cli.client_options import (
    Chosen,
    CommandConsole,
    Json,
    Key,
    Url,
    connected,
    finite_option,
    name_option,
    takes,
    text_option,
)
from cli.help_texts import is_given
from cli.job_options import IMAGE, Fields, chosen_fields, job_options, parse_fields, require_one_value
from cli.messages import print_error
from fusequeue import (
    Client,
    ClientError,
    Event,
    Job,
    OutputParams,
    RefusedError,
    UnexpectedResponse,
    Unreachable,
)
from fusequeue.result_files import check_folder

JobId = Annotated[str, typer.Argument(help="Job id.", callback=name_option)]
Prompt = Annotated[
    str | None,
    typer.Argument(help="What the image, video or sound is of; models of meshes take none.", callback=text_option),
]
Model = Annotated[
    str, typer.Option(help="A model listed by `fusequeue models`.", rich_help_panel=IMAGE, callback=text_option)
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        rich_help_panel=IMAGE,
        help="Image to start from or to edit; repeat it for several.",
    ),
]
Mask = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, rich_help_panel=IMAGE, help="Mask: white is repainted."),
]
Video = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, rich_help_panel=IMAGE, help="MP4 or MOV to change, or to move as in it."),
]
Faces = Annotated[
    Path | None,
    typer.Option(
        "--face-video", exists=True, dir_okay=False, rich_help_panel=IMAGE, help="Faces, for a --video of poses."
    ),
]
Audio = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, rich_help_panel=IMAGE, help="Sound to start from."),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        file_okay=False,
        help="Folder for the images. Default: this one, or none where they go elsewhere.",
    ),
]
PutUrls = Annotated[
    list[str] | None,
    typer.Option(help="Presigned URL that gets an image with a PUT; repeat it for several.", callback=text_option),
]
Bucket = Annotated[
    str | None, typer.Option(metavar="BUCKET[/PREFIX]", help="Bucket for the images.", callback=text_option)
]
Wait = Annotated[bool, typer.Option(help="Wait for the result and save it.")]
Show = Annotated[bool, typer.Option("--show", help="Open the result.")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", min=0, help="Most seconds to wait.", callback=finite_option)
]


@takes(job_options())
def submit(
    context: typer.Context,
    chosen: Chosen,
    prompt: Prompt = None,
    model: Model = "demo",
    image: Images = None,
    mask: Mask = None,
    video: Video = None,
    face_video: Faces = None,
    audio: Audio = None,
    field: Fields = None,
    out: Folder = None,
    output_url: PutUrls = None,
    output_bucket: Bucket = None,
    wait: Wait = True,
    show: Show = False,
    timeout_s: Timeout = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Submit a job, wait with a progress bar, and save its images."""
    chosen = chosen_fields(chosen)
    if image:
        chosen |= {"image": image[0]} if len(image) == 1 else {"images": image}
    destination = parse_destination(output_url or [], output_bucket)
    fields = parse_fields(field or [])
    own = {"prompt": True, "model": is_given(context, "model"), "mask": mask, "output": destination}
    require_one_value(fields, [*chosen, *(name for name, value in own.items() if value)])
    with connected(url, api_key, as_json) as (client, console):
        if wait and (out is not None or not (destination or "output" in fields)):
            check_folder(out or Path("."))
        job = client.submit(
            model,
            prompt,
            mask=mask,
            video=video,
            face_video=face_video,
            audio=audio,
            output=destination,
            extra_body=fields,
            **chosen,
        )
        if not wait:
            print_job(console, job)
            return
        job = _wait_for_submitted(client, console, job, timeout_s)
        files = _save(client, job, out) if out is not None or job.output is None else []
        print_job(console, job, files)
        for file in files if show else ():
            webbrowser.open(file.resolve().as_uri())


def _wait_for_submitted(client: Client, console: CommandConsole, job: Job, timeout_s: float | None) -> Job:
    """Return the job once it has succeeded; a failure names it, as the service has it."""
    try:
        ended = _wait(client, console, job, timeout_s)
    except KeyboardInterrupt:
        console.err.print(f"job {job.id} continues; `fusequeue cancel {job.id}` cancels it")
        raise
    except (RefusedError, Unreachable, UnexpectedResponse):
        print_error(f"job {job.id} is submitted; `fusequeue watch {job.id}` waits for it again")
        raise
    if ended.status != "succeeded":
        print_job(console, ended)
    return ended.require_success()


def _save(client: Client, job: Job, folder: Path | None) -> list[Path]:
    try:
        return client.download(job, folder or Path("."))
    except (OSError, ClientError):
        where = f"`fusequeue watch {job.id} --json` has their URLs"
        print_error(f"job {job.id} succeeded; its images are not saved; {where}")
        raise


def watch(job_id: JobId, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Show a job's progress until it ends; with --json, print each event on a line, and the ended job."""
    with connected(url, api_key, as_json) as (client, console):
        job = _wait(client, console, job_id, None)
        print_job(console, job)
        job.require_success()


def parse_destination(urls: Sequence[str], bucket: str | None) -> OutputParams | None:
    """Return where the images go; None without an option for it."""
    if urls and bucket is not None:
        raise typer.BadParameter("send either it or --output-bucket", param_hint="'--output-url'")
    if bucket is None:
        return {"put_urls": urls} if urls else None
    name, _, prefix = bucket.partition("/")
    return {"bucket": name, "prefix": prefix} if prefix else {"bucket": name}


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
    if job.status in ("queued", "running") and job.progress.step:
        lines.append(("steps", f"{job.progress.step} of {job.progress.total}"))
    if (queue := job.queue) is not None:
        known = (("position", queue.position), ("reason", queue.reason), ("seconds left", queue.eta_s))
        lines += [(name, value) for name, value in known if value is not None]
    if job.error is not None:
        lines.append(("error", f"{job.error.message} ({job.error.code})"))
    lines += [("warning", warning.message) for warning in job.warnings]
    if job.flagged:
        lines.append(("flagged", f"{', '.join(map(str, job.flagged))}, by the model's safety checker"))
    if job.batching is not None and job.batching.solo_reason:
        lines.append(("solo", job.batching.solo_reason))
    if job.metrics.device_seconds is not None:
        lines.append(("device seconds", job.metrics.device_seconds))
    lines += [("at", one.location or one.url) for one in job.artifacts if one.location is not None or not files]
    lines += [("saved", file) for file in files]
    value = {**job.model_dump(mode="json"), "files": [str(file) for file in files]} if files else job
    console.record(value, lines)
