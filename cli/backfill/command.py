"""The command `fusequeue backfill`: submits the prompts of a file and saves the results; a rerun resumes."""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress
from rich.text import Text

from cli.backfill.ledger import NAME, Entry, EntryState, Ledger, LedgerError
from cli.backfill.prompts import PromptsError, file_name, read
from cli.client_options import CommandConsole, Exit, Fields, Json, Key, Url, exit_on_error
from cli.messages import one_line
from cli.submit import parse_fields
from fusequeue import AsyncClient, Job, NotFound

MANIFEST = "manifest.jsonl"
CHUNK_LINES = 250  # per request; a line always belongs to the same chunk, so its idempotency key never changes
DOWNLOADS = 8  # concurrent
MIN_PAUSE_S, MAX_PAUSE_S = 0.2, 3.0


@dataclass(frozen=True)
class BackfillOptions:
    """`in_flight` limits the jobs queued or running at a time, `attempts` the jobs submitted for one line."""

    folder: Path
    in_flight: int = 1_000
    attempts: int = 3


def backfill(
    prompts: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A .txt, .csv or .jsonl file.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the results and the manifest.")],
    model: Annotated[str, typer.Option(help="Model of lines that set none.")] = "demo",
    field: Fields = None,
    in_flight: Annotated[int, typer.Option(min=1, max=100_000, help="Most jobs queued or running at a time.")] = 1_000,
    attempts: Annotated[int, typer.Option(min=1, max=10, help="Most jobs submitted for one line.")] = 3,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Retry lines that failed before.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Generate an image for each prompt of a file. The same command resumes after Ctrl-C, a crash or a failure."""
    console = CommandConsole(as_json)
    with exit_on_error(), _invalid_files(out):
        ledger = _open(prompts, out, {"model": model, **parse_fields(field or [])})
        try:
            if retry_failed:
                ledger.retry_failed()
            asyncio.run(_run(ledger, BackfillOptions(out, in_flight, attempts), console, (url, api_key)))
        except KeyboardInterrupt:
            console.err.print("stopped; submitted jobs continue. Run the same command to resume")
            raise
        finally:
            ledger.write_manifest(out / MANIFEST)
            counts = ledger.counts()
            ledger.close()
        _print_summary(console, counts, out)
    raise typer.Exit(Exit.FAILED if counts[EntryState.FAILED] else Exit.OK)


@contextmanager
def _invalid_files(out: Path) -> Iterator[None]:
    """Turn faults of the prompts and of the folder's ledger into `BadParameter`."""
    try:
        yield
    except PromptsError as error:
        raise typer.BadParameter(one_line(str(error)), param_hint="'prompts'") from None
    except LedgerError as error:
        raise typer.BadParameter(str(error), param_hint="'--out'") from None
    except sqlite3.Error as error:
        message = f"{out / NAME}: {error}; another backfill uses it, or choose another folder"
        raise typer.BadParameter(one_line(message), param_hint="'--out'") from None


def _open(prompts: Path, out: Path, common: dict[str, Any]) -> Ledger:
    ledger = Ledger(out)
    try:
        ledger.begin(read(prompts, common))
    except BaseException:
        ledger.close()
        raise
    return ledger


async def _run(
    ledger: Ledger, options: BackfillOptions, console: CommandConsole, service: tuple[str | None, str | None]
) -> None:
    url, key = service
    columns = (
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[status]}"),
        _Speed(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    quiet = console.as_json or not console.err.is_terminal
    with progress.Progress(*columns, console=console.err, disable=quiet) as bar:
        task = bar.add_task("backfill", total=sum(ledger.counts().values()), status="")

        def update() -> None:
            counts = ledger.counts()
            failed = f", {counts[EntryState.FAILED]} failed" if counts[EntryState.FAILED] else ""
            status = f"{counts[EntryState.SUBMITTED]} submitted{failed}"
            bar.update(task, completed=counts[EntryState.DONE] + counts[EntryState.FAILED], status=status)

        update()
        async with AsyncClient(url, api_key=key) as client:
            await Backfill(client, ledger, options, update).run()


class _Speed(progress.ProgressColumn):
    """Recent lines per second."""

    def render(self, task: progress.Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "")


def _print_summary(console: CommandConsole, counts: dict[EntryState, int], out: Path) -> None:
    done, failed = counts[EntryState.DONE], counts[EntryState.FAILED]
    lines: list[tuple[str, object]] = [("saved", f"{done} of {sum(counts.values())}"), ("manifest", out / MANIFEST)]
    if failed:
        lines.insert(1, ("failed", f"{failed}; the manifest has the errors; --retry-failed retries them"))
    console.record({**{state.value: count for state, count in counts.items()}, "manifest": str(out / MANIFEST)}, lines)


@dataclass(frozen=True)
class Backfill:
    """Submits and saves all lines of a ledger; calls `on_change` after each change."""

    client: AsyncClient
    ledger: Ledger
    options: BackfillOptions
    on_change: Callable[[], None]
    _downloads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(DOWNLOADS))

    async def run(self) -> None:
        """Run until every line is done or failed."""
        pause_s = MIN_PAUSE_S
        while True:
            counts = self.ledger.counts()
            if not counts[EntryState.NEW] and not counts[EntryState.SUBMITTED]:
                return
            capacity = self.options.in_flight - counts[EntryState.SUBMITTED]
            enough = capacity >= min(CHUNK_LINES, self.options.in_flight)
            if counts[EntryState.NEW] and enough and await self._submit(min(capacity, CHUNK_LINES)):
                continue
            started = time.monotonic()
            saved = await self._collect()
            # A poll costs the service a page per hundred jobs: limited to a quarter of the time.
            pause_s = MIN_PAUSE_S if saved else min(MAX_PAUSE_S, pause_s * 1.5)
            await asyncio.sleep(max(pause_s, 3 * (time.monotonic() - started)))

    async def _submit(self, limit: int) -> int:
        """Submit the next lines and return how many were accepted or refused permanently.

        Idempotency keys are the same after a crash. Lines without a failed job are submitted together, each at its
        fixed position in its chunk; a retried line needs a new key for each attempt and is submitted separately.
        """
        entries = self.ledger.entries(EntryState.NEW, limit)
        first_attempts = [entry for entry in entries if not entry.failed_attempts]
        results: list[tuple[int, str | None, str | None]] = []
        for chunk, lines in groupby(first_attempts, lambda entry: entry.number // CHUNK_LINES):
            bodies: list[dict[str, Any] | None] = [None] * CHUNK_LINES
            for entry in lines:
                bodies[entry.number % CHUNK_LINES] = self._body(entry)
            results += await self._submit_lines(bodies, f"{self.ledger.run_id}-{chunk}", chunk * CHUNK_LINES)
        for entry in entries[len(first_attempts) :]:
            key = f"{self.ledger.run_id}-{entry.number}-{entry.failed_attempts}"
            results += await self._submit_lines([self._body(entry)], key, entry.number)
        self.ledger.submitted(results)
        self.on_change()
        return len(results)

    async def _submit_lines(
        self, bodies: Sequence[dict[str, Any] | None], key: str, first: int
    ) -> list[tuple[int, str | None, str | None]]:
        """Submit lines from number `first` on; return number, job and error of all but those refused temporarily."""
        results: list[tuple[int, str | None, str | None]] = []
        async for result in self.client.submit_many(bodies, idempotency_key=key):
            error = result.error
            if error is None or not error.retryable:  # a line refused temporarily stays NEW
                message = None if error is None else f"{error.message} ({error.code})"
                results.append((first + result.line - 1, result.id, message))
        return results

    def _body(self, entry: Entry) -> dict[str, Any]:
        return {"priority": "bulk", **entry.body, "batch_id": self.ledger.run_id}

    async def _collect(self) -> int:
        """Save the results of jobs that have ended; return how many lines that concerns."""
        entries = self.ledger.entries(EntryState.SUBMITTED, self.options.in_flight)
        submitted = {entry.job: entry for entry in entries}
        if not submitted:
            return 0
        unlisted = set(submitted)
        ended: list[Job] = []
        async with aclosing(self.client.jobs(batch_id=self.ledger.run_id)) as jobs:
            async for job in jobs:
                if job.id in unlisted and job.ended:
                    ended.append(job)
                unlisted.discard(job.id)
                if not unlisted:
                    break
        await asyncio.gather(*(self._save(submitted[job.id], job) for job in ended))
        for job_id in unlisted:
            await self._save_unlisted(submitted[job_id])
        return len(ended) + len(unlisted)

    async def _save(self, entry: Entry, job: Job) -> None:
        if job.status != "succeeded":
            failure = f"{job.error.message} ({job.error.code})" if job.error else job.status
            retry = bool(job.error and job.error.retryable) and entry.failed_attempts + 1 < self.options.attempts
            self.ledger.failed(entry.number, failure, retry=retry)
        else:
            async with self._downloads:
                name = file_name(entry.number, job.prompt)
                files = await self.client.download(job, self.options.folder, name=name)
            self.ledger.done(entry.number, [file.name for file in files])
        self.on_change()

    async def _save_unlisted(self, entry: Entry) -> None:
        """Handle a line whose job is not listed: it was deleted, or its retention has ended."""
        try:
            job = await self.client.get(entry.job or "")
        except NotFound:
            self.ledger.failed(entry.number, "the job no longer exists: deleted, or past its retention", retry=False)
            self.on_change()
            return
        if job.ended:
            await self._save(entry, job)
