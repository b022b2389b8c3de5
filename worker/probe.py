"""`python -m worker.probe`: measure the batch cost curve of each model, show it, and save it for workers.

With `--step-cache`, calibrate its step caching instead, and save the schedules in the models file.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from shared.autoscaling.efficient_rows import efficient_rows
from shared.config import models_file, settings
from shared.config.model_spec import ModelSpec
from shared.config.models_file_edit import save_step_cache, step_cache_table
from shared.config.settings import Settings
from shared.config.step_schedules import CacheLevel
from shared.errors import FusequeueError, InferenceFailed
from shared.job import Job
from shared.queue import Queue
from shared.runtime import log, plots
from worker.engine.checks.sample_jobs import default_size, sample_job
from worker.engine.checks.warm_up import row_counts
from worker.engine.device import choose_device, measure_peak_memory
from worker.engine.protocol import ForwardDone
from worker.engine.sample_engine import SampleEngine, sample_engine
from worker.engine.step_calibration import LEAST_PSNR, PROMPTS, ScheduleError, calibrate, calibrated, choose

STEPS = 8
SAMPLES = 5  # as many as a worker needs to trust a time
MAX_REPEATS = 8
MIB = 2**20

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """Median `seconds` of a step of `rows` rows, from one forward to the next.

    `peak_bytes` is its memory in addition to the model, on GPUs only.
    """

    rows: int
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Probed:
    """One model at its default size. Larger row counts than those measured do not fit or are not allowed."""

    spec: ModelSpec
    device: str
    shape: str
    measured: tuple[Measured, ...]

    @property
    def seconds(self) -> dict[int, float]:
        return {one.rows: one.seconds for one in self.measured}

    @property
    def row_bytes(self) -> int | None:
        """Memory of an additional row, None if it was not measured."""
        first, last = self.measured[0], self.measured[-1]
        if first.peak_bytes is None or last.peak_bytes is None or last.rows == first.rows:
            return None
        return round((last.peak_bytes - first.peak_bytes) / (last.rows - first.rows))


def probe(spec: ModelSpec, configured: Settings) -> Probed:
    """Measure a model in a new engine; raises the error of its first failed job."""
    device = choose_device(configured.device)
    measured: list[Measured] = []
    with sample_engine(spec, configured) as engine:
        for rows in row_counts(spec.max_batch):
            peak_bytes = measure_peak_memory(device)
            forwards = _run_jobs(engine, spec, rows)
            if not forwards:  # so many rows do not fit into memory
                break
            last, seconds = forwards[-1], [forward.step_s for forward in forwards]
            # The first forward of a kind includes its set-up.
            measured.append(Measured(rows, statistics.median(seconds[1:] or seconds), peak_bytes()))
    if not measured:
        raise InferenceFailed(f"model {spec.id!r}: its jobs ran no denoiser forward")
    return Probed(spec, last.device, last.shape, tuple(measured))


def _run_jobs(engine: SampleEngine, spec: ModelSpec, rows: int) -> list[ForwardDone]:
    """Run `rows` jobs at a time until they have had enough forwards of `rows` rows, or none; return these forwards."""
    forwards: list[ForwardDone] = []
    for repeat in range(MAX_REPEATS):
        for event in engine.run([_job(spec, rows, repeat * rows + at) for at in range(rows)]):
            if isinstance(event, ForwardDone) and event.rows + event.padding == rows:
                forwards.append(event)
        if not forwards or len(forwards) > SAMPLES:
            break
    return forwards


def _job(spec: ModelSpec, rows: int, at: int) -> Job:
    job = sample_job(spec, spec.tasks[0], at, f"a lighthouse, number {at}", default_size(spec))
    steps = max(spec.limits.min_steps, min(STEPS, spec.limits.max_steps))
    return job.model_copy(update={"id": f"{at}-of-{rows}", "steps": steps})


def table(results: Sequence[Probed]) -> Table:
    """Return a table of one row per model and row count."""
    output = Table("model", "size", "rows", "ms/forward", "ms/image", "vs. one row", "MiB", "")
    for result in results:
        efficient = efficient_rows(result.seconds, result.spec.max_batch)
        solo_s = result.measured[0].seconds
        for measured in result.measured:
            image_s = measured.seconds / measured.rows
            output.add_row(
                result.spec.id,
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


def memory_notes(results: Sequence[Probed]) -> list[str]:
    """Return each model's memory per row, and a warning where `max_batch` does not fit into memory."""
    notes = []
    for result in results:
        spec = result.spec
        if result.row_bytes is not None:
            notes.append(f"{spec.id}: {result.row_bytes / MIB:.0f} MiB per additional row")
        if result.measured[-1].rows < spec.max_batch:
            notes.append(f"{spec.id}: {spec.max_batch} rows do not fit into memory; lower max_batch")
    return notes


async def save(results: Sequence[Probed], configured: Settings) -> None:
    """Save the cost curves in Redis; raises `RedisUnavailable`."""
    queue = Queue.connect(configured)
    try:
        await queue.check()
        for result in results:
            for rows, seconds in result.seconds.items():
                await queue.workers.learn_cost(result.device, result.spec.id, result.shape, rows, seconds)
    finally:
        await queue.close()


def schedules_table(results: Sequence[tuple[ModelSpec, Mapping[CacheLevel, ScheduleError]]]) -> Table:
    """Return a table of one row per model and level."""
    output = Table("model", "level", "every", "order", "of", "steps computed", "PSNR")
    for spec, chosen in results:
        for level, one in chosen.items():
            schedule = one.schedule
            values = (str(schedule.every), schedule.order, schedule.of, f"{one.computed:.0%}", f"{one.psnr:.1f} dB")
            output.add_row(spec.id, level, *values)
    return output


def calibrate_steps(options: argparse.Namespace, configured: Settings, console: Console) -> int:
    """Calibrate step caching, print the schedules and save them; return 1 when a model could not be calibrated."""

    def measure(spec: ModelSpec) -> tuple[ModelSpec, dict[CacheLevel, ScheduleError]]:
        measured = calibrate(spec, configured, options.prompt or PROMPTS)
        chosen, best = choose(measured), max(one.psnr for one in measured)
        for level in [level for level in CacheLevel if level not in chosen]:
            note = f"{spec.id}: no schedule is good enough for {level}: {best:.1f} of {LEAST_PSNR[level]:g} dB"
            console.print(note, highlight=False)
        return spec, chosen

    results, status = _of_each_model(measure, options, configured, console)
    if not results:
        return status
    console.print(schedules_table(results))
    tables = {spec.id: calibrated(spec.step_cache, chosen) for spec, chosen in results}
    for model, caching in tables.items():
        console.print(f"{model}:\n{step_cache_table(caching)}", highlight=False, markup=False, soft_wrap=True)
    if options.keep:
        for model, caching in tables.items():
            save_step_cache(configured.models, model, caching)
        console.print(f"saved in {configured.models}: restart the API and the workers", highlight=False)
    return status


def run(options: argparse.Namespace, configured: Settings, console: Console) -> int:
    """Measure, print, plot and save; return 1 when a model could not be measured."""
    if options.plot is not None:
        plots.require_matplotlib()
    results, status = _of_each_model(lambda spec: probe(spec, configured), options, configured, console)
    if not results:
        return status
    console.print(table(results))
    for note in memory_notes(results):
        console.print(note, highlight=False)
    if options.plot is not None:
        title = f"seconds by rows on {results[0].device}"
        curves = {f"{result.spec.id} {result.shape}": result.seconds for result in results}
        options.plot.write_text(plots.cost_curves_svg(title, curves), "utf-8")
        console.print(f"plot: {options.plot}", highlight=False)
    if options.keep:
        asyncio.run(save(results, configured))
        console.print("saved: workers start from these seconds", highlight=False)
    return status


def _of_each_model(
    measure: Callable[[ModelSpec], T], options: argparse.Namespace, configured: Settings, console: Console
) -> tuple[list[T], int]:
    """Return what `measure` returns for each model, and 1 if it failed for one, which is printed; else 0."""
    catalog = models_file.load(configured.models)
    results, status = list[T](), 0
    for spec in [catalog.get(name) for name in options.model] if options.model else catalog:
        try:
            results.append(measure(spec))
        except FusequeueError as error:
            console.print(f"{spec.id}: {error.message}", highlight=False)
            status = 1
    return results, status


def main() -> int:
    parser = argparse.ArgumentParser(prog="fusequeue probe", description=__doc__)
    parser.add_argument("--model", action="append", help="measure only this model; repeat it for several")
    parser.add_argument("--plot", type=Path, help="write the curves as an SVG image")
    parser.add_argument("--step-cache", action="store_true", help="calibrate step caching instead")
    parser.add_argument("--prompt", action="append", help="calibrate with this prompt; repeat it for several")
    parser.add_argument("--keep", action=argparse.BooleanOptionalAction, default=True, help="save what was measured")
    options = parser.parse_args()
    console = Console()
    try:
        log.configure("ERROR")
        command = calibrate_steps if options.step_cache else run
        return command(options, settings.load(), console)
    except FusequeueError as error:
        console.print(f"fusequeue: {error.message}", highlight=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
