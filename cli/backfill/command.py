"""The command `fusequeue backfill`: submits the prompts of a file and saves the results; a rerun resumes."""

import asyncio
import re
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress
from rich.text import Text

from cli.backfill.ledger import NAME, Entry, EntryState, Ledger, LedgerError
from cli.backfill.prompts import OWN_BATCH, PromptsError, file_name, read
from cli.client_options import CommandConsole, Exit, Fields, Json, Key, Url, exit_on_error
from cli.messages import one_line
from cli.submit import parse_fields
from cli.up import folder_lock
from fusequeue import AsyncClient, Job, LineFailure, NotFound, RefusedError
from fusequeue.transport import RETRIED
from shared.errors import ConfigurationError

MANIFEST = "manifest.jsonl"
LOCK = "backfill.lock"
UNFINISHED = re.compile(r"\.\d{6,}.*-\d+\.\w+\.[0-9a-f]{8}\.part")
CHUNK_LINES = 250  # per request; a line always belongs to the same chunk, so its idempotency key never changes
DOWNLOADS = 8  # concurrent
MIN_PAUSE_S, MAX_PAUSE_S = 0.2, 3.0
SERVICE_FULL = frozenset({429, 503})  # or unavailable: no fault of a line
NOT_OF_THE_LINE = RETRIED | {401}  # of a download: the service is full or unavailable, or refuses the API key


@dataclass(frozen=True)
class BackfillOptions:
    """`in_flight` limits the jobs queued or running at a time, `attempts` the submits and jobs of one line."""

    folder: Path
    in_flight: int = 1_000
    attempts: int = 3


def backfill(
    prompts: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A .txt, .csv or .jsonl file.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the results and the manifest.")],
    model: Annotated[str, typer.Option(help="Model of lines that set none.")] = "demo",
    field: Fields = None,
    in_flight: Annotated[int, typer.Option(min=1, max=100_000, help="Most jobs queued or running at a time.")] = 1_000,
    attempts: Annotated[int, typer.Option(min=1, max=10, help="Most attempts for one line.")] = 3,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Retry lines that failed before.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Generate an image for each prompt of a file. The same command resumes after Ctrl-C, a crash or a failure."""
    console = CommandConsole(as_json)
    common = {"model": model, **parse_fields(field or [])}
    if "batch_id" in common:
        raise typer.BadParameter(OWN_BATCH, param_hint="'--set'")
    with exit_on_error(), _invalid_files(out), _locked(out):
        ledger = _open(prompts, out, common)
        try:
            if retry_failed:
                ledger.retry_failed()
            asyncio.run(_run(ledger, BackfillOptions(out, in_flight, attempts), console, (url, api_key)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            console.err.print(
                "stopped; submitted jobs continue. Run the same command to resume; to cancel them: "
                f"fusequeue cancel --batch {ledger.run_id}"
            )
            raise KeyboardInterrupt from None
        finally:
            ledger.write_manifest(out / MANIFEST)
            counts, flagged = ledger.counts(), ledger.flagged()
            ledger.close()
        _print_summary(console, counts, flagged, out)
    raise typer.Exit(Exit.FAILED if counts[EntryState.FAILED] else Exit.OK)


@contextmanager
def _invalid_files(out: Path) -> Iterator[None]:
    """Turn faults of the prompts and of the folder's ledger into `BadParameter`."""
    try:
        yield
    except PromptsError as error:
        raise typer.BadParameter(one_line(str(error)), param_hint="'prompts'") from None
    except (LedgerError, ConfigurationError) as error:
        raise typer.BadParameter(one_line(str(error)), param_hint="'--out'") from None
    except sqlite3.Error as error:
        message = f"{out / NAME}: {error}; another backfill uses it, or choose another folder"
        raise typer.BadParameter(one_line(message), param_hint="'--out'") from None


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Create and lock the folder, and remove the files that a killed backfill left unfinished."""
    out.mkdir(parents=True, exist_ok=True)
    with folder_lock.lock(out / LOCK, "--out"):
        for part in out.glob(".*.part"):
            if UNFINISHED.fullmatch(part.name):
                part.unlink(missing_ok=True)
        yield


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
    running = asyncio.current_task()
    if running is not None and threading.current_thread() is threading.main_thread():
        # As asyncio.run does on SIGINT: the ledger stays whole, and downloads that write their files finish.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
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
            await Backfill(client, ledger, options, update, _refusal_printer(console)).run()


def _refusal_printer(console: CommandConsole) -> Callable[[LineFailure], None]:
    """Return a function that prints why lines wait, once for each reason."""
    printed: set[str] = set()

    def print_refusal(refusal: LineFailure) -> None:
        if refusal.code not in printed:
            printed.add(refusal.code)
            console.err.print(one_line(f"waiting: {refusal.message} ({refusal.code})"), markup=False)

    return print_refusal


class _Speed(progress.ProgressColumn):
    """Recent lines per second."""

    def render(self, task: progress.Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "")


def _print_summary(console: CommandConsole, counts: dict[EntryState, int], flagged: int, out: Path) -> None:
    done, failed = counts[EntryState.DONE], counts[EntryState.FAILED]
    lines: list[tuple[str, object]] = [("saved", f"{done} of {sum(counts.values())}"), ("manifest", out / MANIFEST)]
    if failed:
        lines.insert(1, ("failed", f"{failed}; the manifest has the errors; --retry-failed retries them"))
    if flagged:
        lines.insert(1, ("flagged", f"{flagged}, by the safety checkers of their models; the manifest has the indexes"))
    values = {state.value: count for state, count in counts.items()}
    console.record({**values, "flagged": flagged, "manifest": str(out / MANIFEST)}, lines)


@dataclass(frozen=True)
class Backfill:
    """Submits and saves all lines of a ledger.

    Calls `on_change` after each change, and `on_refusal` for each line that the service refuses for now.
    """

    client: AsyncClient
    ledger: Ledger
    options: BackfillOptions
    on_change: Callable[[], None]
    on_refusal: Callable[[LineFailure], None]
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
        """Submit the next lines and return how many were accepted or refused.

        Idempotency keys are the same after a crash: a line has a fixed position in its chunk, and each of its attempts
        a key.
        """
        entries = self.ledger.entries(EntryState.NEW, limit)
        submitted = 0
        for (attempt, chunk), group in groupby(entries, lambda one: (one.failed_attempts, one.number // CHUNK_LINES)):
            lines = {entry.number % CHUNK_LINES + 1: entry for entry in group}
            submitted += await self._submit_lines(lines, f"{self.ledger.run_id}-{chunk}-{attempt}")
        self.on_change()
        return submitted

    async def _submit_lines(self, lines: Mapping[int, Entry], key: str) -> int:
        """Submit the lines of one request, by position; a line that is refused for now stays NEW and does not count."""
        bodies = [self._body(lines[at]) if at in lines else None for at in range(1, CHUNK_LINES + 1)]
        results: list[tuple[int, str | None, str | None]] = []
        failed = 0
        async for result in self.client.submit_many(bodies, idempotency_key=key):
            entry, error = lines[result.line], result.error
            if error is None:
                results.append((entry.number, result.id, None))
            elif not error.retryable:
                results.append((entry.number, None, f"{error.message} ({error.code})"))
            elif error.status in SERVICE_FULL:
                self.on_refusal(error)
            else:  # the line itself can be the reason: the URL of its image does not respond
                self._failed(entry, f"{error.message} ({error.code})")
                failed += 1
        self.ledger.submitted(results)
        return len(results) + failed

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
            self._failed(entry, failure, retry=bool(job.error and job.error.retryable))
        else:
            await self._download(entry, job)
        self.on_change()

    async def _download(self, entry: Entry, job: Job) -> None:
        name = file_name(entry.number, job.prompt)
        try:
            async with self._downloads:
                files = await self.client.download(job, self.options.folder, name=name)
        except RefusedError as error:
            if error.status in NOT_OF_THE_LINE:
                raise
            self._failed(entry, f"its image cannot be read: {error.message} ({error.code})", retry=False)
        else:
            self.ledger.done(entry.number, [file.name for file in files], job.flagged)

    def _failed(self, entry: Entry, error: str, *, retry: bool = True) -> None:
        """Count a failed attempt; with `retry` another one follows, up to the limit."""
        self.ledger.failed(entry, error, retry=retry and entry.failed_attempts + 1 < self.options.attempts)

    async def _save_unlisted(self, entry: Entry) -> None:
        """Handle a line whose job is not listed: it was deleted, or its retention has ended."""
        try:
            job = await self.client.get(entry.job or "")
        except NotFound:
            self._failed(entry, "the job no longer exists: deleted, or past its retention", retry=False)
            self.on_change()
            return
        if job.ended:
            await self._save(entry, job)
