"""An engine without torch: each forward sleeps, and writes the runs it advances to a journal file.

Its images have a state that each step changes, and checkpoints that hold it, like those of the engine.
"""

from __future__ import annotations

import functools
import io
import json
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from chaos import hooks
from shared.config.catalog import Catalog
from shared.config.settings import Settings
from shared.errors import InferenceFailed
from shared.job import Phase
from shared.job_record import BatchingStats
from shared.signature import signature
from worker.engine import protocol
from worker.engine.checkpoints.policy import is_due
from worker.engine.engine_status import Activity, EngineStatus, shape_key
from worker.engine.outputs import Output
from worker.engine.protocol import EngineEvents, EngineRequest, ImageCheckpoint, MemoryOrders

JOURNAL, STEP_S = "CHAOS_JOURNAL", "CHAOS_STEP_S"
FAILS = "fail"
"""A job whose prompt begins with this fails in its last forward, as planned."""

EPOCH_STEPS = 1000
"""Progress counts from epoch * EPOCH_STEPS, so that the reports of two claims of a job differ."""


class Forward(NamedTuple):
    """One row of one forward, from the journal, and its start (`time.time()`)."""

    pid: int
    job_id: str
    epoch: int
    step: int
    at_s: float


def read_journal(path: Path) -> Iterator[Forward]:
    """Yield what the engines have written so far; a line that is being written is left out."""
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if line.endswith(b"\n"):
            entry = json.loads(line)
            for run in entry["runs"]:
                yield Forward(entry["pid"], *run, entry["at"])


@dataclass
class _Run:
    """One claim of a job; its claim key is `job:epoch`. `lost_s`: device time since the last checkpoint."""

    request: EngineRequest
    step: int = 0
    states: list[int] = field(default_factory=list)
    forwards: int = 0
    max_jobs: int = 1
    lost_s: float = 0.0

    def __post_init__(self) -> None:
        """Continue from the checkpoints, if each image has one."""
        job, files = self.request.job, [json.loads(data) for data in self.request.checkpoints if data is not None]
        image = next((state_in(data) for data in self.request.inputs.images), None)
        self.states = [_first_state(job.seed_of(index), image) for index in range(job.n)]
        if len(files) == job.n and all(file["job"] == job.id for file in files):
            self.step, self.states = files[0]["step"], [file["state"] for file in files]

    @property
    def epoch(self) -> int:
        return int(self.request.claim_key.rpartition(":")[2])

    @property
    def resumed_steps(self) -> int:
        return self.request.job.n * (self.step - self.forwards)

    def advance(self, jobs: int, device_s: float) -> None:
        """Do a step, in a forward with other jobs."""
        self.states = [_next_state(state, self.step) for state in self.states]
        self.step, self.forwards, self.max_jobs = self.step + 1, self.forwards + 1, max(self.max_jobs, jobs)
        self.lost_s += device_s

    def checkpoint(self) -> protocol.CheckpointTaken:
        key, job, total = self.request.claim_key, self.request.job, self.request.job.steps
        if self.request.checkpoint_s is None:
            return protocol.CheckpointTaken(key, reason="its request has no checkpoint_s")
        if not self.forwards:
            return protocol.CheckpointTaken(key)
        self.lost_s = 0.0
        files = [json.dumps({"job": job.id, "step": self.step, "state": state}).encode() for state in self.states]
        return protocol.CheckpointTaken(key, tuple(ImageCheckpoint(data, self.step, total) for data in files))


def _next_state(state: int, step: int) -> int:
    """Return what a step makes of an image: each step counts, and different images stay different."""
    return (5 * state + step) % 2**24


def _first_state(seed: int, image: int | None) -> int:
    """Return the state of an image before its first step: that of the image from which it starts counts."""
    return seed if image is None else (3 * image + seed + 1) % 2**24


def final_state(seed: int, steps: int, image: int | None = None) -> int:
    """Return the state of an image after its last step, by which the checker knows whose image it is."""
    return functools.reduce(_next_state, range(steps), _first_state(seed, image))


def state_in(data: bytes) -> int:
    """Return the state that the color of a stored image shows."""
    with Image.open(io.BytesIO(data)) as image:
        red, green, blue = image.convert("RGB").getpixel((0, 0))  # type: ignore[misc]
    return int(red | green << 8 | blue << 16)


def _color(state: int) -> tuple[int, int, int]:
    return state & 255, state >> 8 & 255, state >> 16 & 255


class StubEngine:
    """Advances the jobs of one signature at a time by one step per forward, up to the model's `max_batch` images."""

    def __init__(self, catalog: Catalog, events: EngineEvents, settings: Settings) -> None:
        self._models = tuple(spec.id for spec in catalog)
        self._events = events
        self._step_s = float(os.environ[STEP_S])
        self._journal = os.open(Path(os.environ[JOURNAL]), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._change = threading.Condition()
        self._runs: dict[str, _Run] = {}
        self._canceled: set[str] = set()
        self._asked: dict[str, bool] = {}  # claim keys whose checkpoints are requested; True: of jobs handed over
        self._stopping = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._loop, name="stub-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def warm_up(self) -> None:
        pass

    def stop(self, timeout_s: float) -> None:
        with self._change:
            self._stopping = True
            self._change.notify()
        self._thread.join(timeout_s)

    def submit(self, *requests: EngineRequest) -> None:
        with self._change:
            self._runs.update({request.claim_key: _Run(request) for request in requests})
            self._change.notify()

    def cancel(self, claim_key: str) -> None:
        with self._change:
            if claim_key in self._runs:
                self._canceled.add(claim_key)

    def take_checkpoints(self, *claim_keys: str) -> None:
        with self._change:
            self._asked = dict.fromkeys(claim_keys, False) | self._asked

    def hand_over(self, *claim_keys: str) -> None:
        with self._change:
            self._asked.update(dict.fromkeys(claim_keys, True))

    def order_models(self, orders: MemoryOrders) -> None: ...

    def replace_models(self, catalog: Catalog, changed: Collection[str]) -> None: ...

    def release_all(self) -> None:
        with self._change:
            self._canceled.update(self._runs)

    def status(self) -> EngineStatus:
        since = self._busy_since
        activity = Activity(busy=since is not None, since_s=since or 0.0)
        return EngineStatus(device="cpu", loaded_models=self._models, activity=activity)

    def _loop(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._runs or self._stopping)
                self._drop_canceled()
                self._take_requested()
                if self._stopping:
                    return
                batch = _selected(list(self._runs.values()))
            if batch:
                self._busy_since = time.monotonic()
                self._forward(batch)
                self._busy_since = None

    def _drop_canceled(self) -> None:
        for key in self._canceled & self._runs.keys():
            del self._runs[key]
            self._events.on_event(protocol.JobFinished(key, canceled=True))
        self._canceled.clear()

    def _take_requested(self) -> None:
        """Take the requested checkpoints, and end the jobs that are handed over and have one."""
        for key, is_handed_over in self._asked.items():
            if run := self._runs.get(key):
                self._events.on_event(taken := run.checkpoint())
                if is_handed_over and taken.reason is None:
                    del self._runs[key]
                    self._events.on_event(protocol.JobFinished(key, canceled=True, resumed_steps=run.resumed_steps))
        self._asked.clear()

    def _forward(self, batch: Sequence[_Run]) -> None:
        runs = [(run.request.job.id, run.epoch, run.step) for run in batch]
        os.write(self._journal, json.dumps({"at": time.time(), "pid": os.getpid(), "runs": runs}).encode() + b"\n")
        time.sleep(self._step_s / 2)
        hooks.reach("mid_forward")
        time.sleep(self._step_s / 2)
        first, rows = batch[0].request, sum(run.request.job.slots for run in batch)
        self._events.on_event(
            protocol.ForwardDone(
                first.job.model, rows, len(batch), self._step_s, "cpu", shape_key(first.job), first.claim_key
            )
        )
        for run in batch:
            run.advance(len(batch), self._step_s * run.request.job.slots / rows)
            self._advanced(run)

    def _advanced(self, run: _Run) -> None:
        key, job = run.request.claim_key, run.request.job
        base = run.epoch * EPOCH_STEPS
        self._events.on_event(protocol.JobProgress(key, base + run.step, base + job.steps))
        if run.step < job.steps:
            if is_due(run.request.checkpoint_s, run.lost_s, job.steps - run.step):
                self._events.on_event(run.checkpoint())
            return
        with self._change:
            self._runs.pop(key, None)
            self._canceled.discard(key)
        if job.prompt.startswith(FAILS):
            self._events.on_event(protocol.JobFinished(key, error=InferenceFailed("planned by the harness")))
            return
        self._events.on_event(protocol.JobPhaseChanged(key, Phase.DECODING))
        for index in range(job.n):
            pixels = np.full((job.height, job.width, 3), _color(run.states[index]), np.uint8)
            self._events.on_event(protocol.OutputReady(key, index, Output(pixels)))
        batching = BatchingStats(forwards=run.forwards, max_jobs=run.max_jobs)
        used_s, resumed = self._step_s * run.forwards, run.resumed_steps
        finished = protocol.JobFinished(key, batching=batching, device_seconds=used_s, resumed_steps=resumed)
        self._events.on_event(finished)


def _selected(runs: Sequence[_Run]) -> list[_Run]:
    """Return the runs of the next forward: those of the oldest's signature that fit, or one solo job."""
    if not runs:
        return []
    leader = runs[0]
    if leader.request.must_run_solo:
        return [leader]
    wanted, slots, batch = signature(leader.request.job), leader.request.spec.max_batch, []
    for run in runs:
        if not run.request.must_run_solo and run.request.job.slots <= slots and signature(run.request.job) == wanted:
            batch.append(run)
            slots -= run.request.job.slots
    return batch
