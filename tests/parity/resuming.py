"""Jobs that are stopped at half of their steps and continue in another process, and what differs in what they make."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness.checkpoints import files_of, halfway, run_with_checkpoints
from harness.engine import EngineHarness, EventRecorder, a_spec, input_files
from harness.model_pool import shared_models
from parity.cells import Cell
from parity.running import as_floats

from shared.config.model_index import index_file
from shared.config.model_spec import ModelSpec
from shared.job import Job
from worker.engine.outputs import Output
from worker.engine.protocol import InputFiles

CONTINUE_S = 300.0
Difference = float | str  # the string is the reason for which a job begins anew


class Made(NamedTuple):
    """What a run of a job has made (`arrays`: pixels and sounds by name), and of how many steps."""

    arrays: Mapping[str, np.ndarray]
    forwards: int
    resumed_steps: int


@dataclass(frozen=True)
class Stopped:
    """A job of the cell with the id `cell`, and the files from which its images continue.

    Its inputs go with it: the encoder of videos makes another file of the same frames in many a process.
    """

    cell: str
    spec: ModelSpec
    job: Job
    inputs: InputFiles
    files: tuple[bytes | None, ...]


@contextmanager
def another_process() -> Iterator[ProcessPoolExecutor]:
    """Start a process that continues jobs, one after the other; it shares no memory with this one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


def resumed_difference(cell: Cell, folder: Path, process: ProcessPoolExecutor) -> Difference:
    """Stop one job of each task of a cell at half of its steps, and continue it in `process`.

    Return the largest difference to the jobs without a stop, or why they begin anew.
    """
    differences: list[float] = []
    with cell.around(), as_floats():
        source = folder if index_file(folder) is not None else cell.build(cell.tiny, folder)
        spec = a_spec(source, tasks=cell.tasks, **({"max_batch": 16} | dict(cell.spec)))
        for job in one_job_of_each_task(cell):
            stopped = run_with_checkpoints(spec, job)
            whole = _made(stopped, job)
            if not stopped.checkpoints:
                return "no forward of its denoiser is seen"
            if (reason := stopped.checkpoints[-1].reason) is not None:
                return reason
            files = files_of(halfway(stopped))
            rest = process.submit(_continue, Stopped(cell.id, spec, job, input_files(job), files)).result(CONTINUE_S)
            assert rest.resumed_steps > 0, f"{job.id}: it began anew"
            assert rest.forwards < whole.forwards, f"{job.id}: no step was spared"
            assert rest.arrays.keys() == whole.arrays.keys()
            differences += [_off(array, rest.arrays[name]) for name, array in whole.arrays.items()]
    return max(differences, default="no job of it has two steps")


def one_job_of_each_task(cell: Cell) -> Iterator[Job]:
    """Yield the first job of each task that has two steps or more."""
    tasks = set()
    for job in cell.first_jobs():
        if job.task not in tasks and job.computed_steps_per_image > 1:
            tasks.add(job.task)
            yield job


def _continue(stopped: Stopped) -> Made:
    """Continue a job in the process that is called."""
    from parity.grid import GRID
    from parity.more.grid import GRID as MORE

    cell = next(one for one in (*GRID, *MORE) if one.id == stopped.cell)
    with shared_models(), cell.around(), as_floats():
        recorder = EngineHarness(stopped.spec).run(stopped.job, inputs=stopped.inputs, checkpoints=stopped.files)
    return _made(recorder, stopped.job)


def _made(recorder: EventRecorder, job: Job) -> Made:
    finished = recorder.finished[job.id]
    assert finished.error is None, finished.error
    arrays = {f"{index}": array for (_, index), array in recorder.images.items()}
    arrays |= {f"{index} with sound": sound for index, sound in _sounds(recorder.outputs)}
    return Made(arrays, len(recorder.forwards), finished.resumed_steps)


def _sounds(outputs: Mapping[tuple[str, int], Output]) -> Iterator[tuple[int, np.ndarray]]:
    for (_, index), output in outputs.items():
        if output.audio is not None:
            yield index, output.audio.samples


def _off(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(np.float64) - other).max())
