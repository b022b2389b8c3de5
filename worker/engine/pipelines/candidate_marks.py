"""The marks of a candidate: steps after which its predicted image is scored, and it waits for the others' scores.

Everything happens in the candidate's greenlet: the noise scheduler's step shows the predicted image before the mark,
and the pipeline's callback decodes it small, scores it and parks. An image that continues from a checkpoint, or begins
anew, passes the marks at which its job has been compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from shared.config.candidates import BestOf
from shared.errors import InferenceFailed
from shared.job import Job
from worker.engine.fusion.task_greenlet import ScoredStep, StepRecord, current_task, park
from worker.engine.pipelines.clones import Pipeline, StepCounter
from worker.engine.pipelines.latent_previews import decode_small
from worker.engine.pipelines.scoring import Scorer, takes_marks

Callback = Callable[..., dict[str, Any]]


def add_marks(
    pipeline: Pipeline, arguments: dict[str, Any], job: Job, steps: StepCounter, scorer: Scorer | None
) -> None:
    """Let a pipeline's call park at the marks of a job with candidates."""
    if job.best_of is None:
        return
    if scorer is None or not takes_marks(pipeline):
        lacks = "its pipeline says nothing of its steps" if scorer is not None else "it has no scorer"
        raise InferenceFailed(f"best_of: model {job.model!r} cannot compare candidates: {lacks}", param="best_of")
    marks = _Marks(pipeline, job, job.best_of, steps, scorer)
    task = current_task()
    if task is not None:
        task.on_step = partial(marks.before_step, task.record)
        arguments["callback_on_step_end"] = marks.followed_by(arguments.get("callback_on_step_end"))


class _Marks:
    def __init__(self, pipeline: Pipeline, job: Job, best_of: BestOf, steps: StepCounter, scorer: Scorer) -> None:
        self._pipeline = pipeline
        self._job = job
        self._best_of = best_of
        self._steps = steps
        self._scorer = scorer
        self._begun = 0  # steps of the noise scheduler
        self._predicted: torch.Tensor | None = None
        self._text = scorer.text(job.prompt)

    @property
    def _marks(self) -> Mapping[int, int]:
        total = getattr(self._pipeline, "num_timesteps", None) or self._job.steps
        return self._best_of.marks(int(total))

    def before_step(self, record: StepRecord | None, scheduler: Any, output: Any, time: Any, sample: Any) -> None:
        """Keep the predicted latents if a mark follows this step, also in the checkpoints until the next step."""
        self._begun += 1
        latents = predicted(scheduler, output, time, sample) if self._begun in self._marks else None
        self._predicted = latents if record is None else record.keep_predicted(latents)

    def followed_by(self, other: Callback | None) -> Callback:
        """Return the callback of the pipeline: another one, and then a mark."""

        def after_step(pipeline: Any, index: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            changed = {} if other is None else other(pipeline, index, time, tensors)
            left = self._marks.get(index + 1)
            if left is not None and index + 1 > self._steps.last_mark:
                park(ScoredStep(index + 1, left, self._score(pipeline, tensors.get("latents"))))
            return changed

        return after_step

    def _score(self, pipeline: Any, latents: torch.Tensor | None) -> float | None:
        """Return the score of the predicted latents, or of `latents` without them; they are free afterwards."""
        latents, self._predicted = latents if self._predicted is None else self._predicted, None
        self._steps.previewing = True
        try:
            image = decode_small(pipeline, self._job, latents)
            if image is None:
                name = type(pipeline).__name__
                raise InferenceFailed(f"best_of: {name} has latents that cannot be shown early", param="best_of")
            return self._scorer.score(image, self._text)
        finally:
            self._steps.previewing = False


def predicted(scheduler: Any, output: Any, time: Any, sample: Any) -> torch.Tensor | None:
    """Return the latents without noise that a denoiser's output predicts; None where a scheduler does not tell."""
    if not isinstance(output, torch.Tensor) or not isinstance(sample, torch.Tensor):
        return None
    shares = _shares(scheduler, time, sample)
    if shares is None:
        return None
    (image, noise), kind = shares, getattr(scheduler.config, "prediction_type", None)
    latents, out = sample.float(), output.float()
    if not hasattr(scheduler, "add_noise") or kind == "flow_prediction":
        return latents - noise * out
    if kind == "epsilon":
        return (latents - noise * out) / image.clamp(min=1e-4)
    if kind == "v_prediction":
        norm = (image**2 + noise**2).sqrt()
        return latents * (image / norm**2) - out * (noise / norm)
    return out if kind == "sample" else None


def _shares(scheduler: Any, time: Any, sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the shares of image and noise in a sample, as the noise scheduler itself adds noise."""
    one = torch.ones((1, 1, 1, 1), device=sample.device)
    none, times = torch.zeros_like(one), torch.as_tensor(time, device=sample.device).reshape(1)
    if hasattr(scheduler, "add_noise"):
        image, noise = scheduler.add_noise(one, none, times), scheduler.add_noise(none, one, times)
    elif hasattr(scheduler, "scale_noise"):
        image, noise = scheduler.scale_noise(one, times, none), scheduler.scale_noise(none, times, one)
    else:
        return None
    return image.reshape(()), noise.reshape(())
