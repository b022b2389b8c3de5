"""What the tests of adapters share: jobs that wear them, a run in which they meet, and the same by PEFT alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from parity.running import TOLERANCE

from harness.engine import Recorder, Room, a_job, a_spec
from shared.config.adapters import AdapterSpec
from shared.config.models_file import ModelSpec
from shared.job import Adapter, Job
from worker.engine import EngineEvent, JobFinished
from worker.engine.pipelines.call_arguments import arguments_for, make_results, set_guidance
from worker.engine.pipelines.input_images import InputImages


def bare(folder: Path) -> Any:
    pipeline: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def denoiser(pipeline: Any) -> str:
    return "unet" if hasattr(pipeline, "unet") else "transformer"


def spec_with(
    folder: Path, files: Mapping[str, Path], components: Mapping[str, str] | None = None, **fields: Any
) -> ModelSpec:
    """Return a model with these adapters; `components` names the denoiser of those that are not for the first one."""
    of = components or {}
    adapters = tuple(
        AdapterSpec(id=name, source=str(file), max_scale=4, component=of.get(name)) for name, file in files.items()
    )
    return a_spec(folder, adapter=adapters, **fields)


def wearing(*scales: tuple[str, float]) -> tuple[Adapter, ...]:
    return tuple(Adapter(id=name, scale=scale) for name, scale in scales)


def eight_jobs(**fields: Any) -> list[Job]:
    """Jobs with `ink`, `oil`, `neon`, mixtures of them, and none; each with `fields` besides."""
    jobs = [
        a_job("none", prompt="a dog"),
        a_job("ink", prompt="a very large dog", steps=5, adapters=wearing(("ink", 1.0))),
        a_job("oil", prompt="fog", guidance_scale=1.0, adapters=wearing(("oil", 1.0))),
        a_job("neon", prompt="a town", negative_prompt="rain", steps=3, adapters=wearing(("neon", 1.0))),
        a_job("ink-lightly", prompt="a boat", guidance_scale=7.0, adapters=wearing(("ink", 0.4))),
        a_job("ink-and-oil", prompt="two boats", adapters=wearing(("oil", 0.7), ("ink", -0.5))),
        a_job("all", prompt="a hill", steps=5, adapters=wearing(("ink", 0.5), ("oil", 1.2), ("neon", 1))),
        a_job("none-either", prompt="a mill", guidance_scale=2.0, steps=6),
    ]
    return [mixing(job).model_copy(update=fields) for job in jobs]


def mixing(job: Job) -> Job:
    """Return the job as the API resolves it for a model whose forward can mix adapters."""
    return job.model_copy(update={"mixed_fields": ("adapters",)})


class Bare:
    """Nothing but diffusers and PEFT between a job's arguments and its pixels."""

    def __init__(self, folder: Path, files: Mapping[str, Path], components: Mapping[str, str] | None = None) -> None:
        self.pipeline = bare(folder)
        self.plain = bare(folder)
        self._made: dict[str, np.ndarray] = {}
        for name, file in files.items():
            second = {"load_into_transformer_2": True} if name in (components or {}) else {}
            self.pipeline.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=name, **second)

    def picture(self, job: Job) -> np.ndarray:
        """Return a job's picture or video, made by itself."""
        known = job.model_dump_json(exclude={"id"})
        if known not in self._made:
            self._made[known] = self._make(job)
        return self._made[known]

    def _make(self, job: Job) -> np.ndarray:
        pipeline = self.pipeline if job.adapters else self.plain
        if job.adapters:
            pipeline.set_adapters([one.id for one in job.adapters], [one.scale for one in job.adapters])
        pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
        set_guidance(pipeline, job)
        with torch.no_grad():
            (made,) = make_results(pipeline, arguments_for(pipeline, job, 0, InputImages()))
        return made.pixels


@dataclass
class Second(Recorder):
    """A listener that has all of `jobs` seated at once, between two forwards, when all of the first have ended."""

    first: set[str] = field(default_factory=set)
    seat: Callable[[], None] = lambda: None

    def on_event(self, event: EngineEvent) -> None:
        super().on_event(event)
        if isinstance(event, JobFinished) and self.first and self.first <= self.ended.keys():
            self.first = set()
            self.facts.clear()
            self.seat()


def run_together(spec: ModelSpec, *jobs: Job, before: Callable[[], object] = lambda: None, **settings: Any) -> Second:
    """Run jobs whose adapters are in memory already, so that they begin together; `before` is called ahead of them."""
    heard = Second()
    room = Room(spec, recorder=heard, **settings)
    early = [job.model_copy(update={"id": f"early-{job.id}", "steps": 1}) for job in jobs if job.adapters]
    heard.first = {job.id for job in early}

    def seat() -> None:
        before()
        room.seat_now(*jobs)

    heard.seat = seat
    room.seat(*early)
    with room.started():
        heard.wait_for([job.id for job in (*early, *jobs)])
    return heard


def assert_all_as_alone(heard: Recorder, lone: Bare, jobs: Sequence[Job]) -> None:
    failed = {job.id: error.message for job in jobs if (error := heard.ended[job.id].error) is not None}
    assert not failed, failed
    for job in jobs:
        off = np.abs(heard.pictures[job.id, 0] - lone.picture(job)).max()
        assert off <= TOLERANCE, f"{job.id} is off by {off}"
