"""`python -m worker.probe`: measure each model of the models file, show how rows pay, and let workers know."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shared.config import models_file, settings
from shared.config.models_file import ModelSpec
from shared.config.settings import Settings
from shared.errors import FusequeueError
from shared.queue import Queue
from shared.runtime import log
from shared.runtime.plots import curves_svg
from worker.cost_curves import efficient_rows
from worker.engine.model_probe import Probed, probe

MIB = 2**20


def table(probed: Sequence[Probed], specs: Sequence[ModelSpec]) -> Table:
    """Return one row for each model and row count."""
    shown = Table("model", "size", "rows", "ms a forward", "ms a picture", "of one row's", "MiB", "")
    for one, spec in zip(probed, specs, strict=True):
        pays = efficient_rows(one.seconds, spec.max_batch)
        lone = one.measured[0].seconds
        for measured in one.measured:
            each = measured.seconds / measured.rows
            shown.add_row(
                one.model,
                one.shape,
                str(measured.rows),
                f"{1000 * measured.seconds:.1f}",
                f"{1000 * each:.1f}",
                f"{each / lone:.0%}",
                "-" if measured.peak_bytes is None else f"{measured.peak_bytes / MIB:.0f}",
                "" if measured.rows <= pays else "does not pay",
                end_section=measured is one.measured[-1],
            )
    return shown


def remarks(probed: Sequence[Probed], specs: Sequence[ModelSpec]) -> list[str]:
    """Return what the table does not say: memory per row, and where memory ended."""
    told = []
    for one, spec in zip(probed, specs, strict=True):
        if one.row_bytes is not None:
            told.append(f"{one.model}: {one.row_bytes / MIB:.0f} MiB for each row more")
        if one.measured[-1].rows < spec.max_batch:
            told.append(f"{one.model}: {spec.max_batch} rows do not fit into memory; lower max_batch spares the tries")
    return told


async def keep(probed: Sequence[Probed], configured: Settings) -> None:
    """Write the curves where workers find them; raises `RedisUnavailable`."""
    queue = Queue.connect(configured)
    try:
        await queue.check()
        for one in probed:
            for rows, seconds in one.seconds.items():
                await queue.workers.learn_cost(one.device, one.model, one.shape, rows, seconds)
    finally:
        await queue.close()


def run(options: argparse.Namespace, configured: Settings, console: Console) -> int:
    """Probe, tell, plot and keep; returns the exit status: 1 when a model could not be measured or kept."""
    served = models_file.load(configured.models)
    wanted = [served.get(name) for name in options.model] if options.model else list(served)
    probed, specs, status = [], [], 0
    for spec in wanted:
        try:
            probed.append(probe(spec, configured))
            specs.append(spec)
        except FusequeueError as error:
            console.print(f"{spec.id}: {error.message}", highlight=False)
            status = 1
    if not probed:
        return status
    console.print(table(probed, specs))
    for line in remarks(probed, specs):
        console.print(line, highlight=False)
    if options.plot is not None:
        title = f"seconds by rows on {probed[0].device}"
        options.plot.write_text(curves_svg(title, {f"{one.model} {one.shape}": one.seconds for one in probed}), "utf-8")
        console.print(f"plot: {options.plot}", highlight=False)
    if options.keep:
        asyncio.run(keep(probed, configured))
        console.print("kept: workers start from these seconds", highlight=False)
    return status


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fusequeue probe", description=__doc__)
    parser.add_argument("--model", action="append", help="measure this one alone; may be given several times")
    parser.add_argument("--plot", type=Path, help="write the curves as an SVG picture")
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="write them to Redis")
    return parser.parse_args(line)


def main() -> int:
    options = arguments()
    console = Console()
    try:
        configured = settings.load()
        log.configure("ERROR")
        return run(options, configured, console)
    except FusequeueError as error:
        console.print(f"fusequeue: {error.message}", highlight=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
