"""A checkpoint: the state of one image after a step, as an immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from worker.engine.checkpoints.mark_state import MarkState

Json = Any


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to: the model's weights, the job, the image in the job, and what computes.

    `versions` are those of the libraries whose code makes the steps.
    """

    model: str
    job: str
    image: int
    device: str
    versions: str


@dataclass(frozen=True)
class Checkpoint:
    """State of an image after `step` of `total` steps; `state` refers to `tensors`, which are on the host.

    `calls` are those of denoisers and control nets so far, `steps` those of noise schedulers. The tensors may be read
    once `ready` has been waited for. `marks` are those of a candidate's job.
    """

    step: int
    total: int
    state: Mapping[str, Json]
    tensors: Mapping[str, torch.Tensor]
    ready: Any = None  # event of a GPU
    marks: MarkState | None = None

    def wait(self) -> None:
        """Wait until the tensors have been copied to the host."""
        if self.ready is not None:
            self.ready.synchronize()
