"""How long the device works for one job, without the forwards of other jobs between its own."""

import math

from shared.job_record import DeviceTimes
from worker.engine.fusion.module_proxy import Stage

_STEP_STAGES = frozenset({Stage.CONTROL, Stage.DENOISE})


class DeviceWork:
    """Adds up whole forwards that a job takes part in, and the code around them; keeps the least share of an image."""

    def __init__(self) -> None:
        self._steps_s = 0.0
        self._rest_s = 0.0
        self._least_s: dict[Stage, float] = {}

    def add(self, stage: Stage | None, seconds: float) -> None:
        """Add work for calls of a stage, None for work without calls."""
        if stage in _STEP_STAGES:
            self._steps_s += seconds
        else:
            self._rest_s += seconds

    def note_share(self, stage: Stage, seconds: float) -> None:
        """Record the share of one image in a forward of this job."""
        self._least_s[stage] = min(seconds, self._least_s.get(stage, math.inf))

    def times(self, steps: float) -> DeviceTimes | None:
        """Return the times of a job that computed `steps` steps of each image; None if it did no work.

        A pipeline without calls to a shared denoiser takes its steps in its own code.
        """
        run_s, steps = self._steps_s + self._rest_s, max(1.0, steps)
        if not run_s:
            return None
        in_own_code = Stage.DENOISE not in self._least_s
        return DeviceTimes(
            step_s=(run_s if in_own_code else self._steps_s) / steps,
            rest_s=0.0 if in_own_code else self._rest_s,
            run_s=run_s,
            least_step_s=self._least_s.get(Stage.DENOISE),
            least_rest_s=None if in_own_code else self._least_s.get(Stage.DECODE),
        )
