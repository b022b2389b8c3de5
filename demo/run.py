"""`python -m demo.run`: start fusequeue, put a mixed load through it, and tell what fusing did to it."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console

from demo.board import Board
from demo.checker import matches
from demo.jobs import Planned, planned
from demo.service import Ended, Service
from demo.sheet import Cell, contact_sheet
from demo.summary import Rate, Summary, same
from fusequeue import AsyncClient, ClientError

# One at a time takes long on a slow machine; what fits into this time is compared, and the summary says how many.
ALONE_BUDGET_S = 60.0
# The model draws better than this; below it, pictures have gone to the wrong clients.
LEAST_FITTING = 0.95
STOP_PATIENCE_S = 90.0


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m demo.run", description=__doc__)
    parser.add_argument("--url", help="use the fusequeue that serves there, instead of starting one")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the pictures")
    return parser.parse_args(line)


@asynccontextmanager
async def started(console: Console) -> AsyncIterator[str]:
    """Run `fusequeue up` on a data folder of its own and yield its URL; the folder stays when something went wrong."""
    folder = Path(tempfile.mkdtemp(prefix="fusequeue-demo-"))
    up = ("-m", "cli.main", "up", "--data-dir", str(folder))
    # The leash stops it should this process be killed; a session of its own keeps the terminal's Ctrl-C from it.
    leash = ("-m", "cli.up.process", str(os.getpid()), str(int(signal.SIGTERM)))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *leash, sys.executable, *up, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        word, _, url = (await process.stdout.readline()).decode().strip().partition(" ")
        if word != "ready":
            raise RuntimeError("fusequeue did not start; it said why above")
        yield url
    except BaseException:
        console.print(f"data and logs are kept in {folder}")
        raise
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_PATIENCE_S):
            await process.wait()
    except TimeoutError:
        process.kill()


async def run_fused(
    service: Service, bodies: Sequence[dict[str, object]], console: Console
) -> tuple[list[Ended], Rate]:
    """Submit all jobs at once, follow them, and return them as they ended, in order."""
    began = time.monotonic()
    with Board(len(bodies), console) as board:

        async def one(body: dict[str, object]) -> Ended:
            return await service.run(body, board.note)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(body)) for body in bodies]
    ended = [task.result() for task in tasks]
    return ended, _rate(ended, time.monotonic() - began)


async def run_alone(
    service: Service, bodies: Sequence[dict[str, object]], console: Console
) -> tuple[list[Ended], Rate]:
    """Run the same jobs one at a time, as many as the budget allows."""
    console.print("the same jobs, one at a time ...")
    began = time.monotonic()
    ended: list[Ended] = []
    for body in bodies:
        ended.append(await service.run_alone(body))
        if time.monotonic() - began > ALONE_BUDGET_S:
            break
    return ended, _rate(ended, time.monotonic() - began)


def _rate(ended: Sequence[Ended], seconds: float) -> Rate:
    return Rate(len(ended), sum(len(one.pictures) for one in ended), seconds)


async def bodies_of(service: Service, jobs: Sequence[Planned]) -> list[dict[str, object]]:
    """Return the jobs' bodies, with the pictures they start from uploaded."""
    bodies = []
    for job in jobs:
        body = dict(job.body)
        if job.start is not None:
            body["image"] = await service.upload(job.start)
        bodies.append(body)
    return bodies


def save(jobs: Sequence[Planned], ended: Sequence[Ended], folder: Path) -> list[Cell]:
    """Write each picture and the contact sheet into `folder`, and return the sheet's cells."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    cells = []
    for number, (planned_job, outcome) in enumerate(zip(jobs, ended, strict=True)):
        job = outcome.job
        details = f"{job.steps} steps, guidance {job.guidance_scale:g}, {job.priority}"
        for index, picture in enumerate(outcome.pictures):
            picture.save(folder / f"{number:02d}-{index} {planned_job.prompt}.png")
            fits = matches(picture, planned_job.prompt)
            cells.append(Cell(picture, planned_job.prompt, details, fits, planned_job.start))
    contact_sheet(cells, f"{len(jobs)} jobs, {len(cells)} pictures").save(folder / "contact-sheet.png")
    return cells


async def demonstrate(url: str, output: Path, console: Console) -> bool:
    """Run the demo against the fusequeue at `url`; tell whether all ended as it should."""
    jobs = planned()
    async with AsyncClient(url) as client:
        service = Service(client)
        bodies = await bodies_of(service, jobs)
        before = await service.forwards()
        console.print(f"{len(jobs)} jobs to {url}")
        fused, fused_rate = await run_fused(service, bodies, console)
        forwards = (await service.forwards()).since(before)
        cells = save(jobs, fused, output)
        alone, alone_rate = await run_alone(service, bodies, console)
    pairs = [
        pair
        for one, other in zip(fused, alone, strict=False)
        for pair in zip(one.pictures, other.pictures, strict=False)
    ]
    summary = Summary(
        submitted=len(jobs),
        succeeded=sum(one.succeeded for one in fused),
        signatures=len({(job.body["width"], job.body["height"]) for job in jobs}),
        fitting=sum(cell.fits for cell in cells),
        forwards=forwards,
        waits_ms=tuple(one.job.metrics.queue_ms or 0 for one in fused if one.succeeded),
        fused=fused_rate,
        alone=alone_rate,
        same=sum(same(one, other) for one, other in pairs),
        compared=len(pairs),
    )
    console.print(f"\npictures: {output}/, all on one sheet: {output / 'contact-sheet.png'}")
    for line in summary.lines():
        console.print(line, highlight=False)
    return verdict(summary, [*fused, *alone], console)


def verdict(summary: Summary, ended: Sequence[Ended], console: Console) -> bool:
    """Tell whether every job ended as it should, naming each that did not."""
    for one in ended:
        if not one.succeeded:
            console.print(f"{one.job.id}: {one.job.status} {one.job.error}, {len(one.pictures)} pictures")
    fitting = summary.fitting >= LEAST_FITTING * summary.fused.pictures
    if not fitting:
        console.print(f"too few pictures fit their prompts: {LEAST_FITTING:.0%} are expected")
    if summary.same != summary.compared:
        console.print("some pictures are not those that their job makes alone")
    return all(one.succeeded for one in ended) and fitting and summary.same == summary.compared


async def main(options: argparse.Namespace) -> int:
    """Run the demo and return the exit status."""
    console = Console(soft_wrap=True)
    good = False
    try:
        if options.url:
            good = await demonstrate(options.url, options.output, console)
        else:
            async with started(console) as url:
                good = await demonstrate(url, options.output, console)
    except* (RuntimeError, ClientError) as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        console.print(f"the demo broke off: {first}")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main(arguments())))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
