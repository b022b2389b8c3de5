"""Warnings about fields of a job that a pipeline's call does not use, or changes."""

from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults
from shared.config.upscaling import rounded_side
from shared.job import Job
from shared.job_fields import PARTS
from shared.job_record import FieldWarning
from shared.tasks import Task
from worker.engine.pipelines.call_arguments import call_fields, guidance, has_fixed_steps
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.extending import unused_frames
from worker.engine.pipelines.model_facts import latent_cell, side_step
from worker.engine.pipelines.sounds import SOUND_STRENGTHS
from worker.engine.pipelines.task_pipelines import Parameters, call_parameters
from worker.engine.pipelines.upscaling import factor_of


def ignored_fields(pipeline: Pipeline, job: Job, defaults: Defaults) -> tuple[FieldWarning, ...]:
    """Return warnings about fields of `job` that the pipeline's call does not use.

    None for the model's `defaults`, which its client may not have sent.
    """
    accepted = call_parameters(pipeline)
    takes_negative = "negative_prompt" in accepted and not _is_distilled(pipeline, job, accepted)
    unsent = (None, 1.0) if job.task is Task.INPAINT else (None, 1.0, defaults.strength)
    ignored = {
        "prompt": bool(job.prompt) and "prompt" not in accepted,
        "negative_prompt": job.negative_prompt not in (None, "", defaults.negative_prompt) and not takes_negative,
        "strength": job.strength not in unsent and accepted.keys().isdisjoint(("strength", *SOUND_STRENGTHS)),
        **{name: name not in accepted for name in call_fields(job) if name not in PARTS},
        "face_video": job.face_video is not None and "face_video" not in accepted,
        "steps": job.steps != defaults.steps and not _takes_steps(pipeline, accepted),
    }
    if (
        (job.true_cfg_scale or 0) > 1
        and job.negative_prompt is None
        and "true_cfg_scale" not in guidance(job, accepted)
    ):
        ignored["true_cfg_scale"] = True  # the pipeline guides only away from a negative prompt
    warnings = tuple(
        FieldWarning(param=name, message=f"{name}: ignored; {_why_ignored(name, job, accepted)}")
        for name, is_ignored in ignored.items()
        if is_ignored
    )
    return (*warnings, *unused_frames(pipeline, job))


def _why_ignored(name: str, job: Job, accepted: Parameters) -> str:
    needs = {"negative_prompt": "a true_cfg_scale above 1", "true_cfg_scale": "a negative_prompt"}
    if name in needs and needs.keys() <= accepted.keys():
        return f"model {job.model!r} uses one only with {needs[name]}"
    return f"model {job.model!r} takes none for {job.task.value}"


def _takes_steps(pipeline: Pipeline, accepted: Parameters) -> bool:
    """Return whether steps are a job's to choose: not if the pipeline has a schedule of its own, as Echo does."""
    if has_fixed_steps(pipeline):
        return False
    return "num_inference_steps" in accepted or getattr(pipeline, "scheduler", None) is not None


def rounded_sides(pipeline: Pipeline, job: Job, spec: ModelSpec) -> tuple[FieldWarning, ...]:
    """Return warnings about sides that the request chose and the pipeline rounds.

    The API refuses such sides once the model's files are known to it.
    """
    if job.task.upscales:
        return _rounded_upscaled(pipeline, job, spec)
    step = side_step(pipeline)
    if job.images and spec.size_like(job.task, job.images[0].width, job.images[0].height) == (job.width, job.height):
        return ()
    chosen = {"width": (job.width, spec.defaults.width), "height": (job.height, spec.defaults.height)}
    return tuple(
        FieldWarning(param=param, message=f"{param}: model {job.model!r} makes multiples of {step}, not {side}")
        for param, (side, default) in chosen.items()
        if side % step and side != default
    )


def _rounded_upscaled(pipeline: Pipeline, job: Job, spec: ModelSpec) -> tuple[FieldWarning, ...]:
    """Return warnings about sides that no image or video gets by the upscale factor of the job."""
    factor, cell = factor_of(pipeline, job), latent_cell(pipeline)
    chosen = {"width": (job.width, spec.defaults.width), "height": (job.height, spec.defaults.height)}
    made = {param: rounded_side(side, factor, cell) for param, (side, _) in chosen.items()}
    return tuple(
        FieldWarning(
            param=param, message=f"{param}: model {job.model!r} makes {made[param]} by factor {factor:g}, not {side}"
        )
        for param, (side, default) in chosen.items()
        if made[param] != side != default
    )


def _is_distilled(pipeline: Pipeline, job: Job, accepted: Parameters) -> bool:
    """Return whether guidance is an input of the denoiser, and a negative prompt counts only with a `true_cfg_scale`.

    Chroma's inpainting takes that and ignores it.
    """
    scale = accepted.get("true_cfg_scale")
    is_off = (job.true_cfg_scale or 1) <= 1 and "true_cfg_scale" not in guidance(job, accepted)
    unused = scale is not None and scale.default <= 1 and is_off
    return unused and not hasattr(type(pipeline), "do_classifier_free_guidance")
