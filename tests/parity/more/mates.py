"""Random batch mates: jobs drawn from a seed run, join and are canceled in one engine, family by family.

Every image must equal that of plain diffusers, and a reproducible image must have the same bits with other batch mates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from harness.engine import EngineHarness, EventRecorder, a_job, a_spec
from parity.more.families import small
from parity.more.running import compare
from parity.plain import PlainPipeline
from parity.running import as_floats
from tiny import registry

from shared.config.model_index import index_file
from shared.job import Job
from shared.tasks import Task
from worker.engine.protocol import EngineEvent, ForwardDone

WORDS = (
    "dog",
    "cat",
    "sea",
    "hill",
    "old",
    "red",
    "tiny",
    "boat",
    "under",
    "a",
    "bright",
    "moon",
    "two",
    "rain",
    "and",
)
MOST_STEPS = 5


@dataclass(frozen=True)
class Mixed:
    """A family with jobs drawn at random. `fields` are those of all jobs; `sizes` and `schedulers` are drawn."""

    tiny: str
    tasks: tuple[Task, ...] = (Task.TEXT_TO_IMAGE,)
    fields: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((64, 64),)
    schedulers: tuple[str, ...] = ()
    spec: Mapping[str, Any] = field(default_factory=dict)
    around: str = ""

    @property
    def same_size(self) -> bool:
        """Whether only jobs of one size share forwards."""
        return "size" not in self.fields.get("mixed_fields", ())

    def context(self) -> AbstractContextManager[Any]:
        return small(self.tiny, self.around)()

    def draw(self, random: Random, name: str, **fixed: Any) -> Job:
        """Return a random job of the family."""
        task = random.choice(self.tasks)
        fields: dict[str, Any] = {
            "task": task,
            "prompt": " ".join(random.choices(WORDS, k=random.choice((1, 2, 2, 2, 9)))),
            "negative_prompt": " ".join(random.choices(WORDS, k=random.randint(1, 5))) if random.random() < 0.4 else "",
            "seed": random.randrange(2**31),
            "steps": random.randint(2, MOST_STEPS),
            "guidance_scale": random.choice((1.0, round(random.uniform(1.5, 7.0), 2))),
            "scheduler": random.choice((None, *self.schedulers)),
        }
        if task.has_strength:
            fields["strength"] = round(random.uniform(max(0.4, 1 / fields["steps"]), 1.0), 2)  # diffusers needs a step
        return a_job(name, **(fields | fixed | dict(self.fields)))


@dataclass(frozen=True)
class Plan:
    """The jobs of one round: `first` begin together, each other one after its number of forwards; some are canceled."""

    first: Sequence[Job]
    joining: Mapping[int, Sequence[Job]]
    canceled: Mapping[int, Sequence[str]]

    @property
    def jobs(self) -> list[Job]:
        return [*self.first, *(job for jobs in self.joining.values() for job in jobs)]

    @property
    def doomed(self) -> set[str]:
        return {name for names in self.canceled.values() for name in names}


def draw_plan(family: Mixed, random: Random, prefix: str, kept: Sequence[Job] = ()) -> Plan:
    """Return a random round of the family; the jobs `kept` are among its own, of which one can be canceled."""
    width, height = (kept[0].width, kept[0].height) if kept else random.choice(family.sizes)
    drawn = []
    for at in range(random.randint(4, 6)):
        if not family.same_size:
            width, height = random.choice(family.sizes)
        fixed = {"width": width, "height": height, "reproducible": bool(kept) or at < 2, "n": random.choice((1, 1, 2))}
        drawn.append(family.draw(random, f"{prefix}-{at}", **fixed))
    jobs = [*kept, *drawn]
    random.shuffle(jobs)
    joins = random.randint(1, 2)
    joining: dict[int, list[Job]] = {}
    for job in jobs[:joins]:
        joining.setdefault(random.randint(1, 4), []).append(job)
    doomed = random.choice([None, *(job.id for job in drawn)])
    return Plan(jobs[joins:], joining, {} if doomed is None else {random.randint(1, 4): [doomed]})


class Round(EventRecorder):
    """A recorder that submits and cancels jobs after some forwards, and keeps the largest batch of each job."""

    def __init__(self) -> None:
        super().__init__()
        self.at_forward: Callable[[int], None] = lambda _count: None
        self.count = 0

    def on_event(self, event: EngineEvent) -> None:
        super().on_event(event)
        if isinstance(event, ForwardDone):
            self.count += 1
            self.at_forward(self.count)


@dataclass(frozen=True)
class Mingled:
    """What the rounds of a family showed: the images compared, and their largest differences.

    `amplified` is the largest effect of a nudge of plain diffusers, where it explains a difference above the tolerance.
    """

    seeds: int
    images: int
    difference: float
    amplified: float
    reproduced: int
    shared: int


class Rounds:
    """One family's engine, and its model in plain diffusers."""

    def __init__(self, family: Mixed, folder: Path) -> None:
        self._family = family
        source = folder if index_file(folder) is not None else registry.save_tiny(family.tiny, folder)
        self._plain = PlainPipeline(source)
        self._recorder = Round()
        spec = {"max_batch": 8, "schedulers": family.schedulers, **family.spec}
        self._harness = EngineHarness(a_spec(source, tasks=family.tasks, **spec), recorder=self._recorder)

    def run(self, seeds: Sequence[int]) -> Mingled:
        """Run two rounds per seed and compare them; raises `AssertionError`."""
        images = reproduced = shared = 0
        largest = amplified = 0.0
        with self._harness.started():
            for seed in seeds:
                random = Random(f"{self._family.tiny} {seed}")
                plan = draw_plan(self._family, random, f"{seed}")
                self._run_round(plan)
                kept = [job for job in plan.jobs if job.id not in plan.doomed]
                difference, effect = compare(self._recorder, self._plain, kept)
                largest, amplified = max(largest, difference), max(amplified, effect)
                images += sum(job.n for job in kept)
                shared += sum(self._recorder.finished[job.id].batching.max_jobs > 1 for job in kept)
                reproduced += self._reproduce([job for job in kept if job.reproducible], random, seed)
        return Mingled(len(seeds), images, largest, amplified, reproduced, shared)

    def _run_round(self, plan: Plan) -> None:
        waiting = dict(plan.joining)

        def at_forward(count: int) -> None:
            if jobs := waiting.pop(count, None):
                self._harness.submit_prepared(*jobs)
            for name in plan.canceled.get(count, ()):
                self._harness.engine.cancel(name)

        self._recorder.count, self._recorder.at_forward = 0, at_forward
        self._harness.submit(*plan.first)
        self._recorder.wait_for([job.id for job in plan.first])
        late = [job for jobs in waiting.values() for job in jobs]  # of forwards that were not needed
        waiting.clear()
        self._harness.submit(*late)
        self._recorder.wait_for([job.id for job in plan.jobs])
        self._recorder.at_forward = lambda _count: None
        failed = {job.id: one.error.message for job in plan.jobs if (one := self._recorder.finished[job.id]).error}
        assert not failed, f"{failed} of {plan}"

    def _reproduce(self, jobs: Sequence[Job], random: Random, seed: int) -> int:
        """Run reproducible jobs again with other batch mates; return the number of images, which must not differ."""
        if not jobs:
            return 0
        again = {job.id: job.model_copy(update={"id": f"{job.id}-again"}) for job in jobs}
        self._run_round(draw_plan(self._family, random, f"{seed}-mate", list(again.values())))
        keys = [(job.id, index) for job in jobs for index in range(job.n)]
        for name, index in keys:
            for one, other in zip(self._made(name, index), self._made(again[name].id, index), strict=True):
                assert np.array_equal(one, other), f"{np.abs(one - other).max():.1e} off: {again[name]}"
        return len(keys)

    def _made(self, name: str, index: int) -> list[np.ndarray]:
        """Return the values of an image, a sound, or a video and its sound."""
        output = self._recorder.outputs.get((name, index))
        sound = [] if output is None or output.audio is None else [output.audio.samples]
        return [self._recorder.images[name, index], *sound]


def run(family: Mixed, folder: Path, seeds: Sequence[int]) -> Mingled:
    with family.context(), as_floats():
        return Rounds(family, folder).run(seeds)
