"""The command `fusequeue backfill`: images for the prompts of a file; a rerun resumes."""

import asyncio
import re
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress
from rich.text import Text

from cli.backfill.ledger import NAME, EntryState, Ledger, LedgerError
from cli.backfill.links import LinkError
from cli.backfill.pipeline import Backfill, BackfillOptions, EveryLineRefused, Refusal
from cli.backfill.prompts import OWN_BATCH, PromptsError, read
from cli.client_options import Chosen, CommandConsole, Exit, Json, Key, Url, exit_on_error, takes
from cli.help_texts import is_given
from cli.job_options import Fields, chosen_fields, job_options, parse_fields, require_one_value
from cli.messages import one_line, print_error
from cli.up import folder_lock
from fusequeue import AsyncClient
from shared.errors import ConfigurationError
from shared.file_names import slug
from shared.runtime.asyncio_tools import cancel_and_wait

MANIFEST = "manifest.jsonl"
LOCK = "backfill.lock"
UNFINISHED = re.compile(r"\.\d{6,}.*-\d+\.\w+\.[0-9a-f]{8}\.part")
PROGRESS_S = 0.5  # between two updates of the bar: each counts the lines of the ledger
SHOWN_FAILURES = 5
LINE_S = 60.0  # between two lines of progress, where there is no terminal


@takes(job_options(left_out={"batch_id", "group"}))
def backfill(
    context: typer.Context,
    prompts: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A .txt, .csv, .jsonl or .ndjson file.")],
    out: Annotated[Path, typer.Option("--out", "-o", file_okay=False, help="Folder for the results and the manifest.")],
    chosen: Chosen,
    model: Annotated[str, typer.Option(help="Model of lines that set none.")] = "demo",
    field: Fields = None,
    in_flight: Annotated[int, typer.Option(min=1, max=100_000, help="Most jobs queued or running at a time.")] = 1_000,
    attempts: Annotated[int, typer.Option(min=1, max=10, help="Most attempts for one line.")] = 3,
    group: Annotated[
        str | None,
        typer.Option(help="Name of its jobs for `fusequeue groups`. Default: from the names of file and folder."),
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Retry lines that failed before.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Generate an image for each prompt of a file. The same command resumes after Ctrl-C, a crash or a failure."""
    console = CommandConsole(as_json)
    fields, assigned = chosen_fields(chosen), parse_fields(field or [])
    given = [name for name in ("model", "group") if is_given(context, name)]
    require_one_value(assigned, [*fields, *given])
    common = {"model": model, **fields, **assigned}
    group = common.pop("group", group)
    if "batch_id" in common:
        raise typer.BadParameter(OWN_BATCH, param_hint="'--set'")
    with exit_on_error(), _invalid_files(out), _locked(out):
        ledger = _open(prompts, out, common, group, console)
        try:
            if retry_failed:
                ledger.retry_failed()
            options = BackfillOptions(out, in_flight, attempts, files=prompts.parent)
            asyncio.run(_run(ledger, options, console, (url, api_key)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            its_jobs = f"groups cancel {ledger.group}" if ledger.group else f"cancel --batch {ledger.run_id}"
            console.err.print(
                "stopped; submitted jobs continue. Run the same command to resume; to cancel them: "
                f"fusequeue {its_jobs}",
                markup=False,
            )
            raise KeyboardInterrupt from None
        except EveryLineRefused as error:
            print_error(f"{error}; nothing was submitted: correct the file or the options")
            raise typer.Exit(Exit.USAGE) from None
        finally:
            ledger.write_manifest(out / MANIFEST)
            counts, flagged, failures = ledger.counts(), ledger.flagged(), ledger.failures(SHOWN_FAILURES)
            ledger.close()
        for number, reason in failures:
            print_error(f"{prompts}:{number}: {reason}")
        _print_summary(console, counts, flagged, out, ledger.group)
    raise typer.Exit(Exit.FAILED if counts[EntryState.FAILED] else Exit.OK)


@contextmanager
def _invalid_files(out: Path) -> Iterator[None]:
    """Turn faults of the prompts and of the folder's ledger into `BadParameter`, and name the folder of a full disk."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        print_error(f"{error.filename or out}: {error.strerror or error}; mend it, and run the same command to resume")
        raise typer.Exit(Exit.USAGE) from None
    except PromptsError as error:
        raise typer.BadParameter(one_line(str(error)), param_hint="'prompts'") from None
    except (LedgerError, ConfigurationError) as error:
        raise typer.BadParameter(one_line(str(error)), param_hint="'--out'") from None
    except sqlite3.Error as error:
        is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        mended = "make room, and run the same command to resume"
        remedy = mended if is_full else "another backfill uses it, or choose another folder"
        message = f"{out / NAME}: {error}; {remedy}"
        raise typer.BadParameter(one_line(message), param_hint="'--out'") from None


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Create and lock the folder, and remove the files that a killed backfill left unfinished.

    An invalid prompt file leaves no folder that was not there before.
    """
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with folder_lock.lock(out / LOCK, "--out"):
            for part in out.glob(".*.part"):
                if UNFINISHED.fullmatch(part.name):
                    part.unlink(missing_ok=True)
            yield
    except PromptsError:
        if is_new:
            shutil.rmtree(out)
        raise


def _open(prompts: Path, out: Path, common: dict[str, Any], group: str | None, console: CommandConsole) -> Ledger:
    ledger = Ledger(out)
    try:
        changed = ledger.begin(read(prompts, common), group, prefix=group_prefix(prompts, out))
        if changed is not None:
            counts = f"{changed.kept} lines are as before, {changed.added} are new, {changed.removed} are gone"
            console.err.print(f"the file or the options changed: {counts}", markup=False)
    except BaseException as error:
        ledger.close()
        if isinstance(error, LinkError):
            raise PromptsError(f"{prompts}:{error}") from None
        raise
    return ledger


def group_prefix(prompts: Path, out: Path) -> str:
    """Return how the name of the group of a backfill begins: with the names of its file and its folder."""
    return "".join(f"{words[:24]}-" for name in (prompts.stem, out.resolve().name) if (words := slug(name)))


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

        def show() -> None:
            counts = ledger.counts()
            failed = f", {counts[EntryState.FAILED]} failed" if counts[EntryState.FAILED] else ""
            status = f"{counts[EntryState.SUBMITTED]} submitted{failed}"
            bar.update(task, completed=counts[EntryState.DONE] + counts[EntryState.FAILED], status=status)

        async def keep_showing() -> None:
            while True:
                if quiet:
                    await asyncio.sleep(LINE_S)
                    console.err.print(progress_line(ledger.counts()), markup=False)
                else:
                    show()
                    await asyncio.sleep(PROGRESS_S)

        async with AsyncClient(url, api_key=key) as client:
            showing = asyncio.create_task(keep_showing())
            try:
                printers = _refusal_printer(console), _group_printer(console, ledger.group)
                await Backfill(client, ledger, options, *printers).run()
            finally:
                await cancel_and_wait((showing,))
        show()  # the last counts


def progress_line(counts: Mapping[EntryState, int]) -> str:
    """Return the counts of lines in words, for a log."""
    failed = f", {counts[EntryState.FAILED]} failed" if counts[EntryState.FAILED] else ""
    return (
        f"{counts[EntryState.DONE]} of {sum(counts.values())} saved, {counts[EntryState.SUBMITTED]} submitted{failed}"
    )


def _refusal_printer(console: CommandConsole) -> Callable[[Refusal], None]:
    """Return a function that prints why lines wait, once for each reason."""
    printed: set[str] = set()

    def print_refusal(refusal: Refusal) -> None:
        if refusal.code not in printed:
            printed.add(refusal.code)
            console.err.print(one_line(f"waiting: {refusal.message} ({refusal.code})"), markup=False)

    return print_refusal


def _group_printer(console: CommandConsole, group: str | None) -> Callable[[], None]:
    """Return a function that prints once how to follow the group of the jobs."""
    unprinted = [] if group is None else [group]

    def print_group() -> None:
        if unprinted:
            name = unprinted.pop()
            text = f"group {name}; its progress, also without this command: fusequeue groups show {name}"
            console.err.print(text, markup=False)

    return print_group


class _Speed(progress.ProgressColumn):
    """Recent lines per second."""

    def render(self, task: progress.Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "")


def _print_summary(
    console: CommandConsole, counts: dict[EntryState, int], flagged: int, out: Path, group: str | None
) -> None:
    done, failed = counts[EntryState.DONE], counts[EntryState.FAILED]
    lines: list[tuple[str, object]] = [("saved", f"{done} of {sum(counts.values())}"), ("manifest", out / MANIFEST)]
    if failed:
        lines.insert(1, ("failed", f"{failed}; the manifest has the errors; --retry-failed retries them"))
    if flagged:
        lines.insert(1, ("flagged", f"{flagged}, by the safety checkers of their models; the manifest has the indexes"))
    values = {state.value: count for state, count in counts.items()}
    console.record({**values, "flagged": flagged, "manifest": str(out / MANIFEST), "group": group}, lines)
