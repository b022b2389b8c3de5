"""`python -m demo.run`: start fusequeue, run a mixed load, and print what continuous batching gained."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console

from demo.checker import matches
from demo.contact_sheet import Cell, contact_sheet
from demo.drawings import all_prompts
from demo.job_client import FinishedJob, JobClient
from demo.planned_jobs import PlannedJob, planned_jobs
from demo.progress_display import ProgressDisplay
from demo.summary import Summary, Throughput, nearly_equal
from fusequeue import AsyncClient, ClientError

# Solo runs are slow on a slow machine: those that fit into this time are compared, and the summary gives their number.
SOLO_BUDGET_S = 60.0
# The model is more accurate than this: below it, clients got each other's images.
MIN_MATCHING = 0.95
STOP_TIMEOUT_S = 90.0
IMAGE_NAME = re.compile(r"\d{2,}-\d+ (?P<prompt>.+)\.png")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.run", description=__doc__)
    parser.add_argument("--url", help="use a running fusequeue instead of starting one")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the images")
    return parser.parse_args(argv)


@asynccontextmanager
async def fusequeue_up(console: Console) -> AsyncIterator[str]:
    """Run `fusequeue up` in a temporary data folder and yield its URL; keep the folder after a failure."""
    folder = Path(tempfile.mkdtemp(prefix="fusequeue-demo-"))
    up = ("-P", "-m", "cli.main", "up", "--data-dir", str(folder))
    # -P keeps modules of the current folder out. The parent watch stops it when this process is killed; a new session
    # keeps the terminal's Ctrl-C from it.
    parent_watch = ("-P", "-m", "shared.runtime.parent_process", str(os.getpid()), str(int(signal.SIGTERM)))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *parent_watch, sys.executable, *up, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        try:
            assert process.stdout is not None
            state, _, url = (await process.stdout.readline()).decode().strip().partition(" ")
            if state != "ready":
                raise RuntimeError("fusequeue did not start; see its messages above")
            yield url
        finally:
            await _stop(process)
    except BaseException:
        console.print(f"data and logs are kept in {folder}")
        raise
    shutil.rmtree(folder, ignore_errors=True)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()


async def run_fused(
    client: JobClient, bodies: Sequence[dict[str, object]], console: Console
) -> tuple[list[FinishedJob], Throughput]:
    """Submit all jobs at once and wait for them."""
    started_at = time.monotonic()
    with ProgressDisplay(len(bodies), console) as display:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.run_with_events(body, display.update)) for body in bodies]
    finished = [task.result() for task in tasks]
    return finished, _throughput(finished, time.monotonic() - started_at)


async def run_solo(
    client: JobClient, bodies: Sequence[dict[str, object]], console: Console
) -> tuple[list[FinishedJob], Throughput]:
    """Run the same jobs one at a time, as many as `SOLO_BUDGET_S` allows."""
    console.print("the same jobs, one at a time ...")
    started_at = time.monotonic()
    finished: list[FinishedJob] = []
    for body in bodies:
        finished.append(await client.run(body))
        if time.monotonic() - started_at > SOLO_BUDGET_S:
            break
    return finished, _throughput(finished, time.monotonic() - started_at)


def _throughput(finished: Sequence[FinishedJob], seconds: float) -> Throughput:
    return Throughput(len(finished), sum(len(job.images) for job in finished), seconds)


async def request_bodies(client: JobClient, jobs: Sequence[PlannedJob]) -> list[dict[str, object]]:
    """Upload the input images and return the complete request bodies."""
    bodies = []
    for job in jobs:
        body = dict(job.body)
        if job.input_image is not None:
            body["image"] = await client.upload(job.input_image)
        bodies.append(body)
    return bodies


def save(jobs: Sequence[PlannedJob], finished: Sequence[FinishedJob], folder: Path) -> list[Cell]:
    """Write each image and the contact sheet into `folder`, and return the sheet's cells.

    Images of an earlier demo are removed; the folder can have other files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    captions = {prompt.caption() for prompt in all_prompts()}
    for old in folder.glob("*.png"):
        name = IMAGE_NAME.fullmatch(old.name)
        if name is not None and name["prompt"] in captions:
            old.unlink()
    cells = []
    for number, (planned, result) in enumerate(zip(jobs, finished, strict=True)):
        job = result.job
        details = f"{job.steps} steps, guidance {job.guidance_scale:g}, {job.priority}"
        for index, image in enumerate(result.images):
            image.save(folder / f"{number:02d}-{index} {planned.prompt}.png")
            correct = matches(image, planned.prompt)
            cells.append(Cell(image, planned.prompt, details, correct, planned.input_image))
    contact_sheet(cells, f"{len(jobs)} jobs, {len(cells)} images").save(folder / "contact-sheet.png")
    return cells


async def run_demo(url: str, output: Path, console: Console) -> bool:
    """Run the demo against the fusequeue at `url`; return whether all results are correct."""
    jobs = planned_jobs()
    async with AsyncClient(url) as api:
        client = JobClient(api)
        bodies = await request_bodies(client, jobs)
        before = await client.forward_counts()
        console.print(f"{len(jobs)} jobs to {url}")
        fused, fused_throughput = await run_fused(client, bodies, console)
        forwards = (await client.forward_counts()).since(before)
        cells = save(jobs, fused, output)
        solo, solo_throughput = await run_solo(client, bodies, console)
    pairs = [
        pair
        for fused_job, solo_job in zip(fused, solo, strict=False)
        for pair in zip(fused_job.images, solo_job.images, strict=False)
    ]
    summary = Summary(
        submitted=len(jobs),
        succeeded=sum(job.succeeded for job in fused),
        signatures=len({(job.body["width"], job.body["height"]) for job in jobs}),
        matching=sum(cell.correct for cell in cells),
        forwards=forwards,
        queue_ms=tuple(job.job.metrics.queue_ms or 0 for job in fused if job.succeeded),
        fused=fused_throughput,
        solo=solo_throughput,
        equal=sum(nearly_equal(fused_image, solo_image) for fused_image, solo_image in pairs),
        compared=len(pairs),
    )
    console.print(f"\nimages: {output}/, all on one sheet: {output / 'contact-sheet.png'}")
    for line in summary.lines():
        console.print(line, highlight=False)
    return all_correct(summary, [*fused, *solo], console)


def all_correct(summary: Summary, finished: Sequence[FinishedJob], console: Console) -> bool:
    """Return whether all results are correct; print what is not."""
    for result in finished:
        if not result.succeeded:
            console.print(f"{result.job.id}: {result.job.status} {result.job.error}, {len(result.images)} images")
    enough_match = summary.matching >= MIN_MATCHING * summary.fused.images
    if not enough_match:
        console.print(f"too few images match their prompts: at least {MIN_MATCHING:.0%} are expected")
    if summary.equal != summary.compared:
        console.print("some images differ from those of solo runs")
    return all(result.succeeded for result in finished) and enough_match and summary.equal == summary.compared


async def main(options: argparse.Namespace) -> int:
    """Run the demo and return the exit status."""
    console = Console(soft_wrap=True)
    correct = False
    try:
        if options.url:
            correct = await run_demo(options.url, options.output, console)
        else:
            async with fusequeue_up(console) as url:
                correct = await run_demo(url, options.output, console)
    except* (RuntimeError, ClientError) as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        console.print(f"the demo failed: {first}")
    return 0 if correct else 1


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main(arguments())))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
