"""The command `fusequeue backfill`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from cli.backfill.ledger import Ledger, LedgerError, Line
from cli.backfill.prompts import PromptsError, read
from cli.backfill.runner import Backfill, Options
from cli.client_options import Json, Key, Url
from cli.jobs import fields_of
from cli.output import CommandConsole, Exit, exit_on_error
from fusequeue import AsyncClient

MANIFEST = "manifest.jsonl"


def backfill(
    prompts: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A .txt, .csv or .jsonl file.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Where results and the manifest go.")],
    model: Annotated[str, typer.Option(help="The model of lines that name none.")] = "demo",
    field: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="NAME=VALUE", help="A field for all lines, e.g. -s steps=20."),
    ] = None,
    in_flight: Annotated[int, typer.Option(min=1, max=100_000, help="Most jobs that wait or run at one time.")] = 1_000,
    tries: Annotated[int, typer.Option(min=1, max=10, help="Jobs made for a line whose job fails.")] = 3,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try lines again that failed before.")] = False,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Make a picture of every prompt in a file. Run it again after Ctrl-C, a crash or a failure: it goes on."""
    screen = CommandConsole(as_json)
    with exit_on_error():
        ledger = _opened(prompts, out, {"model": model, **fields_of(field or [])})
        try:
            if retry_failed:
                ledger.retry_failed()
            asyncio.run(_round(ledger, Options(out, in_flight, tries), screen, (url, api_key)))
        except KeyboardInterrupt:
            screen.err.print("stopped; what was submitted goes on. The same command goes on from here")
            raise
        finally:
            ledger.write_manifest(out / MANIFEST)
            counts = ledger.counts()
            ledger.close()
        _tell(screen, counts, out)
    raise typer.Exit(Exit.FAILED if counts[Line.FAILED] else Exit.OK)


def _opened(prompts: Path, out: Path, common: dict[str, Any]) -> Ledger:
    ledger = Ledger(out)
    try:
        ledger.begin(read(prompts, common))
    except (PromptsError, LedgerError) as error:
        ledger.close()
        raise typer.BadParameter(str(error)) from None
    return ledger


async def _round(
    ledger: Ledger, options: Options, screen: CommandConsole, service: tuple[str | None, str | None]
) -> None:
    url, key = service
    with _bar(screen.err, screen.as_json) as bar:
        counts = ledger.counts()
        task = bar.add_task("backfill", total=sum(counts.values()), told="")

        def changed() -> None:
            now = ledger.counts()
            failed = f", {now[Line.FAILED]} failed" if now[Line.FAILED] else ""
            words = f"{now[Line.SUBMITTED]} submitted{failed}"
            bar.update(task, completed=now[Line.DONE] + now[Line.FAILED], told=words)

        changed()
        async with AsyncClient(url, api_key=key) as client:
            await Backfill(client, ledger, options, changed).run()


def _bar(console: Console, quiet: bool) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[told]}"),
        _Speed(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=quiet or not console.is_terminal,
    )


class _Speed(ProgressColumn):
    """Lines a second, of late."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "")


def _tell(screen: CommandConsole, counts: dict[Line, int], out: Path) -> None:
    done, failed = counts[Line.DONE], counts[Line.FAILED]
    told: list[tuple[str, object]] = [("saved", f"{done} of {sum(counts.values())}"), ("manifest", out / MANIFEST)]
    if failed:
        told.insert(1, ("failed", f"{failed}; why is in the manifest; --retry-failed tries them again"))
    screen.one({**{state.value: count for state, count in counts.items()}, "manifest": str(out / MANIFEST)}, told)
