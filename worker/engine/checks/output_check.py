"""The check of a pipeline's output at load: its tensors must equal its PIL images.

Some pipelines return tensors that are not brought to 0 to 1 or to the job's size, or for which they run no safety
checker and add no watermark.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from shared.job import Job
from shared.tasks import Task
from worker.engine.checks.sample_jobs import SampleSize, sample_files, sample_job, sample_sizes
from worker.engine.errors import as_job_error
from worker.engine.fusion.image_task import ImageTask
from worker.engine.pipelines.call_results import images_of, is_flagged
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.pipelines.loaded_model import LoadedModel
from worker.engine.pipelines.task_pipelines import takes_last_image
from worker.engine.pipelines.text_cache import try_copy

log = structlog.get_logger()

PIL = "pil"
FASTER = ("pt", "np")  # tensors are converted on the device; arrays still show values that are not numbers
TOLERANCE = 1.01 / 255  # PIL images are rounded

Outputs = dict[str, list[Any]]  # of each shared method, in order


@dataclass(frozen=True)
class Sample:
    """What a pipeline returned for a sample job, and the outputs of the modules that it called."""

    images: list[torch.Tensor]
    flagged: bool
    outputs: Mapping[str, list[Any]]

    @property
    def is_blank(self) -> bool:
        """Whether nothing can be seen: the safety checker made it black, or it has no numbers."""
        return all(bool(image.amax() == image.amin()) for image in self.images)

    def equals(self, other: "Sample") -> bool:
        """Return whether images, flags and the number of calls of each module are those of `other`."""
        calls, other_calls = ({name: len(made) for name, made in one.outputs.items()} for one in (self, other))
        if self.flagged != other.flagged or calls != other_calls or len(self.images) != len(other.images):
            return False
        return all(_is_close(one, another) for one, another in zip(self.images, other.images, strict=True))


def choose_output_types(model: LoadedModel, device: torch.device) -> None:
    """Choose the output type of each task: the fastest with images equal to the pipeline's PIL images."""
    for task in model.templates:
        if task.makes_audio:  # samples have no PIL image
            model.output_types[task] = FASTER[0]
        if task.makes_audio or task.makes_mesh:
            continue
        found = (_choose(model, task, size, device) for size in sample_sizes(model.spec))
        chosen = next(filter(None, found), None)
        if chosen is None:
            log.warning("output_check_incomplete", model=model.spec.id, task=task.value)
        model.output_types[task] = chosen or PIL
        log.debug("output_type_chosen", model=model.spec.id, task=task.value, output_type=model.output_types[task])


def _choose(model: LoadedModel, task: Task, size: SampleSize, device: torch.device) -> str | None:
    """Return the output type for a task; None if the pipeline fails at this size."""
    if getattr(model.templates[task], "watermarker", None) is not None:
        return PIL  # DeepFloyd IF's mark is in PIL images only, and outside of those smaller than its UNet's size
    last_image = bool(takes_last_image(model.templates[task]))
    job = sample_job(model.spec, task, 0, "a lighthouse", size, last_image=last_image)
    expected = _run(model, job, PIL, device, {})
    if expected is None:
        return None
    for output_type in FASTER:
        if output_type == "pt" and expected.is_blank:
            continue  # equal blanks would prove nothing
        made = _run(model, job, output_type, device, expected.outputs)
        if made is not None and made.equals(expected):
            return output_type
    return PIL


def _run(
    model: LoadedModel, job: Job, output_type: str, device: torch.device, known: Mapping[str, list[Any]]
) -> Sample | None:
    """Run the pipeline of `job`; calls with outputs in `known` get these. None if it failed."""
    inputs = decode_inputs(job, sample_files(job))

    def body() -> tuple[list[torch.Tensor], bool]:
        pipeline, arguments = model.prepare_call(job, 0, inputs, StepCounter(lambda: None), output_type)
        result = pipeline(**arguments)
        return list(images_of(pipeline, arguments, result)), is_flagged(result)

    task = ImageTask(body, watch=model.watch)
    try:
        outputs = _run_to_end(task, device, known)
        error = task.error
    except BaseException as raised:  # by the code of a model, which concerns no other
        error = as_job_error(raised)
    finally:
        task.abort()
    if error is not None:
        log.info("output_check_failed", model=model.spec.id, output_type=output_type, error=error.message)
        return None
    images, flagged = task.result
    return Sample(images, flagged, outputs)


def _run_to_end(task: ImageTask, device: torch.device, known: Mapping[str, list[Any]]) -> Outputs:
    """Run a task, and return the outputs of its calls."""
    outputs, left = Outputs(), {name: deque(values) for name, values in known.items()}
    task.start(device)
    while (call := task.parked_call) is not None:
        name = call.shared_method.name
        output = left[name].popleft() if left.get(name) else None
        if output is None or call.private:  # the pipeline's own hooks must see the forward
            output = call.run()
        outputs.setdefault(name, []).append(output)
        copied = try_copy(output)  # pipelines can change outputs in place
        task.resume(device, output if copied is None else copied)
    return outputs


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two images are equal but for rounding; values that are not numbers equal nothing."""
    if one.shape != other.shape:
        return False
    return bool((one.float().cpu() - other.float().cpu()).abs().max() <= TOLERANCE)
