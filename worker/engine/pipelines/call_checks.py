"""What a pipeline's call does not take of a job: errors that name the field."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shared.architectures.registry import FIXED_RATES
from shared.errors import InferenceFailed, UnusableInput
from shared.job import Job
from shared.job_fields import PARTS
from shared.tasks import Task
from worker.engine.pipelines.clones import Pipeline, StepCounter
from worker.engine.pipelines.task_pipelines import Parameters, call_parameters, takes_last_image


def check_steps_of_controls(job: Job, accepted: Parameters) -> None:
    """Raise `UnusableInput` for a control of some steps only, if the pipeline applies it to all.

    T2I-Adapters of Stable Diffusion XL end together, and none begins late.
    """
    end = job.controls[0].end if "adapter_conditioning_factor" in accepted else 1.0
    parts = [at for at, control in enumerate(job.controls) if (control.start, control.end) != (0.0, end)]
    if parts and "control_guidance_start" not in accepted:
        at = parts[0]
        param = f"controls.{at}.{'start' if job.controls[at].start else 'end'}"
        message = f"controls of model {job.model!r} apply to all steps for {job.task.value}; remove start and end"
        raise UnusableInput(message, param=param)


def check_last_image(pipeline: Pipeline, job: Job) -> None:
    taken = takes_last_image(pipeline) if job.task is Task.IMAGE_TO_VIDEO else False
    if taken is False and job.last_image is not None:
        raise UnusableInput(f"model {job.model!r} takes no last_image", param="last_image")
    if taken is True and job.last_image is None:
        raise UnusableInput(f"model {job.model!r} needs a last_image", param="last_image")


def check_steps(pipeline: Pipeline, job: Job) -> None:
    """Raise `InferenceFailed` for one step of a schedule that is stretched to a last value: diffusers divides by 0."""
    config = getattr(getattr(pipeline, "scheduler", None), "config", {})
    if job.steps == 1 and config.get("shift_terminal"):
        raise InferenceFailed(f"steps: model {job.model!r} needs at least 2", param="steps")


def check_parts(job: Job, accepted: Parameters) -> None:
    """Raise `InferenceFailed` for a part of the denoising that the call does not take."""
    for name in PARTS:
        if getattr(job, name) is not None and name not in accepted:
            raise InferenceFailed(f"{name}: model {job.model!r} takes none for {job.task.value}", param=name)


def check_gives_latents(pipeline: Pipeline, job: Job) -> None:
    """Raise `InferenceFailed` for a pipeline whose latents no other job takes."""
    if "denoising_end" not in call_parameters(pipeline):
        message = f"output_format: model {job.model!r} gives no latents for {job.task.value}"
        raise InferenceFailed(message, param="output_format")


def check_latents(pipeline: Pipeline, job: Job, latents: torch.Tensor) -> None:
    """Raise `UnusableInput` for latents that are not those of the job's image, and if the pipeline takes none."""
    if "denoising_start" not in call_parameters(pipeline):
        raise UnusableInput(f"model {job.model!r} takes no latents", param="image")
    scale, channels = pipeline.vae_scale_factor, pipeline.vae.config.latent_channels
    needed = [1, channels, job.height // scale, job.width // scale]
    if list(latents.shape) != needed:
        message = f"the latents have the shape {list(latents.shape)}; model {job.model!r} needs {needed}"
        raise UnusableInput(message, param="image")


def check_rate(pipeline: Pipeline, job: Job) -> None:
    """Raise `InferenceFailed` for a rate that the video would have without its sound, which is made for another one."""
    fps = FIXED_RATES.get(type(pipeline).__name__, job.fps)
    if job.fps != fps:
        raise InferenceFailed(f"fps: videos of model {job.model!r} have {fps}, not {job.fps}", param="fps")


def check_part_has_steps(job: Job, steps: StepCounter) -> None:
    """Raise `InferenceFailed` if the part of the denoising that a job does has had no step."""
    part = next((name for name in PARTS if getattr(job, name) is not None), None)
    if part is not None and not steps.step:
        message = f"{part}: {getattr(job, part)} leaves none of the {job.steps} steps; use more steps, or another part"
        raise InferenceFailed(message, param=part)


@contextmanager
def inputs_refused(job: Job, steps: StepCounter) -> Iterator[None]:
    """Raise `InferenceFailed` for a `ValueError` before the first step that names an input of `extra`, and
    `UnusableInput` for any other of an edit, a mesh or a video to enlarge: the pipeline refuses its input.

    FLUX.2 does so for small and for long images. Pipelines of other tasks get images of the job's own size.
    """
    try:
        yield
    except ValueError as error:
        if steps.total:
            raise
        for name in (name for name in job.extra or {} if f"`{name}`" in str(error)):
            raise InferenceFailed(f"extra.{name}: {error}"[:500], param=f"extra.{name}") from None
        if job.task not in (Task.EDIT, Task.IMAGE_TO_MESH, Task.UPSCALE_VIDEO):
            raise
        param = "image" if job.video is None else "video"
        what = "the input image" if job.video is None else "the video"
        raise UnusableInput(f"model {job.model!r} refuses {what}: {error}"[:500], param=param) from None
