"""A cell of the parity grid: one tiny pipeline, the jobs that run through it together, and what is expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from harness.engine import a_job
from tiny import registry

from shared.job import Job
from shared.tasks import Task

Fields = Mapping[str, Any]

LONG = "a very large number of dogs, one behind the other, on their way to the sea in the early morning"


@dataclass(frozen=True)
class Cell:
    """One row of the page.

    `jobs` (name -> fields of a `Job`) begin together, `joining` after the first forward. `fused_rows` is the number of
    images in the first denoiser forward, by default all of `jobs`. `limits` says what is not supported, and
    why; a job of `refused` ends with an error, which the page quotes after its name. `around` is the context of the
    whole cell. `quick` cells run in every `make test`. Not `caches_steps`: too few steps in a loop.
    """

    family: str
    models: str
    pipelines: str
    tiny: str
    jobs: Mapping[str, Fields]
    joining: Mapping[str, Fields] = field(default_factory=dict)
    tasks: tuple[Task, ...] = (Task.TEXT_TO_IMAGE,)
    spec: Fields = field(default_factory=dict)
    fused_rows: int | None = None
    limits: str = ""
    refused: Mapping[str, Fields] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    build: Callable[[str, Path], Path] = registry.save_tiny
    quick: bool = False
    caches_steps: bool = True

    @property
    def id(self) -> str:
        return f"{self.tiny}: {self.models}"

    @property
    def needs_torchvision(self) -> bool:
        return registry.needs_torchvision(self.tiny)

    def first_jobs(self) -> list[Job]:
        return [a_job(name, **fields) for name, fields in self.jobs.items()]

    def joining_jobs(self) -> list[Job]:
        return [a_job(name, **fields) for name, fields in self.joining.items()]

    @property
    def first_rows(self) -> int:
        return sum(job.n for job in self.first_jobs()) if self.fused_rows is None else self.fused_rows


# Prompts of different lengths, seeds, steps, guidance and numbers of images, mixed by every text-to-image row.
TEXT: Mapping[str, Fields] = {
    "plain": {"prompt": "a dog", "steps": 5},
    "long": {"prompt": LONG, "steps": 6, "guidance_scale": 7.5},
    "short": {"prompt": "fog", "steps": 4, "guidance_scale": 1.0},
    "negative": {"prompt": "a town at night", "negative_prompt": "rain, snow", "guidance_scale": 2.5, "steps": 5},
    "two": {"prompt": "a boat on a lake", "n": 2, "steps": 5},
    "few-steps": {"prompt": "a mill", "steps": 3, "guidance_scale": 6.0},
}
IMAGES: Mapping[str, Fields] = {
    "from-image": {"prompt": "a hill", "strength": 0.5, "steps": 8},
    "from-image-strongly": {"prompt": "another hill under clouds", "strength": 0.9, "guidance_scale": 6.0},
    "from-image-weakly": {"prompt": "a hill in the sun", "strength": 0.25, "steps": 4},
}
MASKED: Mapping[str, Fields] = {
    "masked": {"task": Task.INPAINT, "prompt": "a well", "strength": 0.7, "steps": 6},
    "masked-whole": {"task": Task.INPAINT, "prompt": f"a garden, and {LONG}", "strength": 1.0, "guidance_scale": 2.0},
    "masked-weakly": {"task": Task.INPAINT, "prompt": "a path", "strength": 0.2, "steps": 5},
}
_WEAKLY: Mapping[str, Fields] = {
    "weakly": {"prompt": "a pond", "steps": 8},
    "one-step": {"prompt": "a lake", "strength": 0.2, "steps": 5},
}
# For models that only inpaint.
REPAINTED: Mapping[str, Fields] = {
    name: {"task": Task.INPAINT, "strength": 1.0 - 0.1 * at, **fields}
    for at, (name, fields) in enumerate({**TEXT, **_WEAKLY}.items())
}
REPAINTED_LATE: Mapping[str, Fields] = {
    "late": {"task": Task.INPAINT, "prompt": "a bridge", "strength": 1.0, "steps": 4},
    "late-and-long": {"task": Task.INPAINT, "prompt": f"{LONG}, and back", "strength": 0.9, "guidance_scale": 3.0},
}
LATE: Mapping[str, Fields] = {
    "late": {"prompt": "a bridge", "steps": 3},
    "late-and-long": {"prompt": f"{LONG}, and back", "steps": 6, "guidance_scale": 3.0},
}
TEXT_AND_IMAGES = (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE)
THREE_TASKS = (*TEXT_AND_IMAGES, Task.INPAINT)


def edits(jobs: Mapping[str, Fields], **more: Any) -> dict[str, Fields]:
    """Return `jobs` as edits of images, with the fields `more`."""
    return {name: {**given, "task": Task.EDIT, **more} for name, given in jobs.items()}


def without(jobs: Mapping[str, Fields], *fields: str) -> dict[str, Fields]:
    """Return `jobs` without `fields`, for pipelines that do not take them."""
    return {name: {key: value for key, value in given.items() if key not in fields} for name, given in jobs.items()}


def small_images(module: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context in which the pipelines of `tiny.<module>` accept small images; imported when entered."""
    return lambda: import_module(f"tiny.{module}").small_images()  # type: ignore[no-any-return]
