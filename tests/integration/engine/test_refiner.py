"""The refiner of XL, which has one text encoder and aesthetic scores: by itself, and for the last steps of the base."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline
from harness.engine import (
    DIFFUSERS_AND_NUMPY,
    SIDE,
    EngineHarness,
    EventRecorder,
    a_job,
    a_spec,
    input_files,
)
from parity.running import TOLERANCE, as_floats, compare, plain_results

from shared.config.scheduler_choices import SchedulerOptions
from shared.inputs.formats.latents import file_of
from shared.job import InputRef, Job
from shared.tasks import LATENTS_TYPE, OutputFormat, Task
from worker.engine.outputs import Latents
from worker.engine.protocol import EngineRequest, InputFiles

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

IMAGE_TASKS = (Task.IMAGE_TO_IMAGE, Task.INPAINT)


@pytest.mark.parametrize("task", IMAGE_TASKS)
def test_a_refiner_is_a_model_like_others(task: Task, tiny_model: Callable[[str], Path]) -> None:
    source, common = tiny_model("sdxl-refiner"), {"task": task, "steps": 6, "strength": 0.7, "prompt": "a dog, a hill"}
    jobs = [a_job(name, **common, seed=seed) for seed, name in enumerate(("first", "second", "third"))]
    jobs[2] = jobs[2].model_copy(update={"negative_prompt": "rain, snow", "guidance_scale": 9.0})
    with as_floats():
        recorder = EngineHarness(a_spec(source, tasks=IMAGE_TASKS)).run(*jobs)
        assert {job.id: recorder.finished[job.id].error for job in jobs} == dict.fromkeys(job.id for job in jobs)
        assert compare(recorder, plain_results(source, jobs)) <= TOLERANCE
    assert recorder.rows[0] == len(jobs)


PROMPT = "a dog on a hill"
STEPS = 6


@dataclass(frozen=True)
class Part:
    """What of the denoising the base does, and how."""

    end: float
    scheduler: str | None
    karras: bool = False
    seed: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        options = SchedulerOptions(karras=True) if self.karras else None
        common = {"prompt": PROMPT, "steps": STEPS, "guidance_scale": 6.0, "negative_prompt": "rain"}
        return {**common, "seed": self.seed, "scheduler": self.scheduler, "scheduler_options": options}


PARTS = {
    "own": Part(0.8, None),
    "own-half": Part(0.5, None, seed=1),
    "karras": Part(0.7, "DPMSolverMultistepScheduler", karras=True, seed=2),
    "ancestral": Part(0.5, "EulerAncestralDiscreteScheduler", seed=3),  # each job draws its own noise
    "heun": Part(0.6, "HeunDiscreteScheduler", seed=4),  # two forwards a step
}


def plain_call(pipeline: Any, part: Part, **arguments: Any) -> torch.Tensor:
    """Call diffusers' pipeline as its documentation of the refiner does."""
    own = pipeline.scheduler
    scheduler_class = type(own) if part.scheduler is None else getattr(diffusers, part.scheduler)
    pipeline.scheduler = scheduler_class.from_config(own.config, **({"use_karras_sigmas": True} if part.karras else {}))
    try:
        return pipeline(
            PROMPT,
            negative_prompt="rain",
            num_inference_steps=STEPS,
            guidance_scale=6.0,
            generator=torch.Generator().manual_seed(part.seed),
            **arguments,
        ).images
    finally:
        pipeline.scheduler = own


def plain_ensemble(base_folder: Path, refiner_folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the latents of the base and the image of the refiner of each part."""
    base = StableDiffusionXLPipeline.from_pretrained(base_folder)
    refiner = StableDiffusionXLImg2ImgPipeline.from_pretrained(refiner_folder)
    made = {}
    for name, part in PARTS.items():
        latents = plain_call(base, part, width=SIDE, height=SIDE, denoising_end=part.end, output_type="latent")
        made[name] = latents, plain_call(refiner, part, image=latents, denoising_start=part.end, output_type="pt")
    return made


def latents_file(latents: Latents) -> bytes:
    return file_of(latents.dtype, latents.shape, latents.values)


def latents_ref(latents: Latents) -> InputRef:
    height, width = latents.shape[-2:]
    return InputRef(id="in_1", key="k", content_type=LATENTS_TYPE, bytes=1, width=width, height=height)


def tensor_of(latents: Latents) -> torch.Tensor:
    return torch.frombuffer(bytearray(latents.values), dtype=torch.float32).reshape(latents.shape)


def run_with_files(harness: EngineHarness, files: Mapping[str, InputFiles], *jobs: Job) -> EventRecorder:
    """Run jobs with input files of their own."""
    requests = [
        EngineRequest(job.id, job, harness.specs[job.model], files.get(job.id, input_files(job))) for job in jobs
    ]
    harness.engine.submit(*requests)
    with harness.started():
        harness.recorder.wait_for([job.id for job in jobs])
    assert {job.id: error for job in jobs if (error := harness.recorder.finished[job.id].error)} == {}
    return harness.recorder


def test_two_jobs_give_the_image_of_plain_base_and_refiner(tiny_model: Callable[[str], Path]) -> None:
    """Beside whole jobs, and with those of other parts and schedulers in one forward."""
    base, refiner = tiny_model("sdxl"), tiny_model("sdxl-refiner")
    first = [
        a_job(name, **part.fields, denoising_end=part.end, output_format=OutputFormat.LATENT)
        for name, part in PARTS.items()
    ]
    whole = a_job("whole", **PARTS["own"].fields)
    with as_floats():
        made = EngineHarness(a_spec(base, max_batch=16)).run(*first, whole)
        assert {job.id: error for job in first if (error := made.finished[job.id].error)} == {}
        second = [
            a_job(
                name,
                **part.fields,
                task=Task.IMAGE_TO_IMAGE,
                denoising_start=part.end,
                images=(latents_ref(made.latents[name, 0]),),
            )
            for name, part in PARTS.items()
        ]
        mate = a_job("mate", strength=0.6, steps=STEPS, prompt="a cat")
        files = {name: InputFiles(images=(latents_file(made.latents[name, 0]),)) for name in PARTS}
        refined = run_with_files(EngineHarness(a_spec(refiner, max_batch=16)), files, *second, mate)
        mates_alone = plain_results(refiner, [mate])
    assert made.rows[0] == len(PARTS) + 1
    assert refined.rows[0] == len(PARTS) + 1
    assert compare(replace_images(made, "whole"), plain_results(base, [whole])) <= TOLERANCE
    assert compare(replace_images(refined, "mate"), mates_alone) <= TOLERANCE
    for name, (latents, image) in plain_ensemble(base, refiner).items():
        scale = float(latents.abs().max())
        assert float((tensor_of(made.latents[name, 0]) - latents).abs().max()) <= TOLERANCE * scale, name
        assert float(np.abs(refined.images[name, 0] - image[0].numpy()).max()) <= TOLERANCE, name


def replace_images(recorder: EventRecorder, name: str) -> EventRecorder:
    """Return a recorder with the outputs of one job."""
    own = {key: output for key, output in recorder.outputs.items() if key[0] == name}
    return EventRecorder(outputs=own, images={key: recorder.images[key] for key in own})


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("denoising_end", {"denoising_end": 0.01}),
        ("denoising_start", {"denoising_start": 0.999, "task": Task.IMAGE_TO_IMAGE}),
    ],
)
def test_a_part_without_a_step_fails(field: str, fields: dict[str, Any], tiny_model: Callable[[str], Path]) -> None:
    """In plain diffusers the image would be noise."""
    recorder = EngineHarness(a_spec(tiny_model("sdxl"))).run(a_job("job", **fields))
    error = recorder.finished["job"].error
    assert error is not None
    assert error.param == field
    assert "leaves none of the 4 steps" in error.message


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("denoising_end", {"denoising_end": 0.8}),
        ("denoising_start", {"denoising_start": 0.8, "task": Task.IMAGE_TO_IMAGE}),
        ("output_format", {"output_format": OutputFormat.LATENT}),
    ],
)
def test_another_pipeline_refuses_them(field: str, fields: dict[str, Any], tiny_model: Callable[[str], Path]) -> None:
    """The API cannot know it of a model on the hub."""
    recorder = EngineHarness(a_spec(tiny_model("sd"))).run(a_job("job", **fields))
    error = recorder.finished["job"].error
    assert error is not None
    assert error.param == field


@pytest.mark.parametrize(
    ("tiny", "shape", "reason"),
    [("sdxl", (1, 4, 8, 4), "needs [1, 4, 8, 8]"), ("sd", (1, 4, 8, 8), "takes no latents")],
)
def test_latents_that_do_not_fit_the_pipeline_fail_the_job(
    tiny: str, shape: tuple[int, ...], reason: str, tiny_model: Callable[[str], Path]
) -> None:
    latents = Latents("F32", shape, bytes(4 * math.prod(shape)))
    job = a_job("job", strength=0.5, images=(latents_ref(latents),))
    harness = EngineHarness(a_spec(tiny_model(tiny)))
    request = EngineRequest("job", job, harness.specs["tiny"], InputFiles(images=(latents_file(latents),)))
    harness.engine.submit(request)
    with harness.started():
        harness.recorder.wait_for(["job"])
    error = harness.recorder.finished["job"].error
    assert error is not None
    assert (error.code, error.param) == ("invalid_input_image", "image")
    assert reason in error.message
