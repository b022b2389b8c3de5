"""`python -m worker.probe`: measure the batch cost curve of each model, show it, and save it for workers."""

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
from shared.runtime import log, plots
from worker.cost_curves import efficient_rows
from worker.engine.model_probe import Probed, probe

MIB = 2**20


def table(results: Sequence[Probed], specs: Sequence[ModelSpec]) -> Table:
    """Return a table of one row per model and row count."""
    output = Table("model", "size", "rows", "ms/forward", "ms/image", "vs. one row", "MiB", "")
    for result, spec in zip(results, specs, strict=True):
        efficient = efficient_rows(result.seconds, spec.max_batch)
        solo_s = result.measured[0].seconds
        for measured in result.measured:
            image_s = measured.seconds / measured.rows
            output.add_row(
                result.model,
                result.shape,
                str(measured.rows),
                f"{1000 * measured.seconds:.1f}",
                f"{1000 * image_s:.1f}",
                f"{image_s / solo_s:.0%}",
                "-" if measured.peak_bytes is None else f"{measured.peak_bytes / MIB:.0f}",
                "" if measured.rows <= efficient else "not efficient",
                end_section=measured is result.measured[-1],
            )
    return output


def memory_notes(results: Sequence[Probed], specs: Sequence[ModelSpec]) -> list[str]:
    """Return each model's memory per row, and a warning where `max_batch` does not fit into memory."""
    notes = []
    for result, spec in zip(results, specs, strict=True):
        if result.row_bytes is not None:
            notes.append(f"{result.model}: {result.row_bytes / MIB:.0f} MiB per additional row")
        if result.measured[-1].rows < spec.max_batch:
            notes.append(f"{result.model}: {spec.max_batch} rows do not fit into memory; lower max_batch")
    return notes


async def save(results: Sequence[Probed], configured: Settings) -> None:
    """Save the cost curves in Redis; raises `RedisUnavailable`."""
    queue = Queue.connect(configured)
    try:
        await queue.check()
        for result in results:
            for rows, seconds in result.seconds.items():
                await queue.workers.learn_cost(result.device, result.model, result.shape, rows, seconds)
    finally:
        await queue.close()


def run(options: argparse.Namespace, configured: Settings, console: Console) -> int:
    """Measure, print, plot and save; return 1 when a model could not be measured."""
    if options.plot is not None:
        plots.require_matplotlib()
    catalog = models_file.load(configured.models)
    selected = [catalog.get(name) for name in options.model] if options.model else list(catalog)
    results, specs, status = [], [], 0
    for spec in selected:
        try:
            results.append(probe(spec, configured))
            specs.append(spec)
        except FusequeueError as error:
            console.print(f"{spec.id}: {error.message}", highlight=False)
            status = 1
    if not results:
        return status
    console.print(table(results, specs))
    for note in memory_notes(results, specs):
        console.print(note, highlight=False)
    if options.plot is not None:
        title = f"seconds by rows on {results[0].device}"
        curves = {f"{result.model} {result.shape}": result.seconds for result in results}
        options.plot.write_text(plots.cost_curves_svg(title, curves), "utf-8")
        console.print(f"plot: {options.plot}", highlight=False)
    if options.keep:
        asyncio.run(save(results, configured))
        console.print("saved: workers start from these seconds", highlight=False)
    return status


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fusequeue probe", description=__doc__)
    parser.add_argument("--model", action="append", help="measure only this model; repeat it for several")
    parser.add_argument("--plot", type=Path, help="write the curves as an SVG image")
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="save them in Redis")
    return parser.parse_args(argv)


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
