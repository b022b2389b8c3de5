"""Jobs that are stopped at half of their steps, and continue from their checkpoints in another engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.engine import EngineHarness, EventRecorder
from shared.config.model_spec import ModelSpec
from shared.job import Job
from worker.engine.engine import Engine
from worker.engine.outputs import Output
from worker.engine.protocol import CheckpointTaken


@dataclass(frozen=True)
class Resumed:
    """A job without a stop, its checkpoint, and the same job continued from it."""

    whole: EventRecorder
    checkpoint: CheckpointTaken
    resumed: EventRecorder

    @property
    def difference(self) -> float:
        """The largest difference of the outputs, pixels and sound."""
        assert self.whole.outputs.keys() == self.resumed.outputs.keys()
        return max(_difference(output, self.resumed.outputs[key]) for key, output in self.whole.outputs.items())

    @property
    def steps_computed(self) -> tuple[int, int]:
        """Denoiser forwards without a stop, and after it."""
        return len(self.whole.forwards), len(self.resumed.forwards)


def resumed(spec: ModelSpec, job: Job, factory: Callable[..., Any] = Engine) -> Resumed:
    """Run `job`, and again from its checkpoint at half of its steps in an engine of `factory`."""
    whole = run_with_checkpoints(spec, job)
    checkpoint = halfway(whole)
    again = EngineHarness(spec, factory=factory).run(job, checkpoints=files_of(checkpoint))
    return Resumed(whole, checkpoint, again)


class _AtOnce:
    """Writes checkpoints on the engine's thread, so that all are reported before the next forward."""

    def submit(self, write: Callable[..., None], *arguments: Any) -> None:
        write(*arguments)

    def shutdown(self, **_options: bool) -> None: ...


def run_with_checkpoints(spec: ModelSpec, job: Job, *, fresh: tuple[str, ...] = (), **request: Any) -> EventRecorder:
    """Run a job that gets checkpoints after each forward; `fresh` models are loaded and not copied."""
    harness = EngineHarness(spec, fresh=fresh)
    harness.engine._checkpoints._writer = _AtOnce()
    return harness.run(job, **({"checkpoint_s": 0.0} | request))


def files_of(event: CheckpointTaken) -> tuple[bytes | None, ...]:
    return tuple(None if image is None else image.data for image in event.images)


def halfway(recorder: EventRecorder) -> CheckpointTaken:
    """Return the first checkpoint in which all images have done half of their steps."""
    for event in recorder.checkpoints:
        if event.images and all(image is not None and 2 * image.step >= image.total for image in event.images):
            return event
    raise AssertionError(f"no checkpoint at half of the steps: {[one.reason for one in recorder.checkpoints]}")


def _difference(one: Output, other: Output) -> float:
    off = float(np.abs(one.pixels.astype(np.float64) - other.pixels).max())
    if one.audio is not None and other.audio is not None:
        off = max(off, float(np.abs(one.audio.samples - other.audio.samples).max()))
    assert (one.audio is None) == (other.audio is None)
    return off
