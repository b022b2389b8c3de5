"""Step caching: which denoising steps of an image are computed, and how the others follow from them.

Plain data, without torch. A schedule is fixed before a job starts: no value of a tensor changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FEWEST_STEPS = 10
"""Images with fewer steps skip none: models for few steps change much at each."""

Count = Annotated[int, Field(strict=True, ge=1, le=1000)]


class CacheLevel(StrEnum):
    LIGHT = "light"
    MEDIUM = "medium"
    STRONG = "strong"


Choice = Literal["off", "light", "medium", "strong"]
Extrapolated = Literal["output", "residual"]


class Extrapolation(StrEnum):
    """How a skipped output follows from the last computed ones."""

    REUSE = "reuse"
    LINEAR = "linear"
    QUADRATIC = "quadratic"

    @property
    def outputs(self) -> int:
        """How many computed outputs it takes."""
        return tuple(Extrapolation).index(self) + 1


class StepSchedule(BaseModel):
    """The `first` and the `last` steps are computed, and one of `every` between them; the others are skipped.

    `order` extrapolates the denoiser's outputs, or with `of = "residual"` what they add to its input.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    every: Annotated[int, Field(strict=True, ge=2, le=8)]
    first: Count = 4
    last: Count = 3
    order: Extrapolation = Extrapolation.LINEAR
    of: Extrapolated = "output"


# For models without a table of their own. With 50 steps, 31, 29 and 22 of them are computed.
CONSERVATIVE: Mapping[CacheLevel, StepSchedule] = {
    CacheLevel.LIGHT: StepSchedule(every=2, first=8, last=4),
    CacheLevel.MEDIUM: StepSchedule(every=2),
    CacheLevel.STRONG: StepSchedule(every=3),
}


class StepCaching(BaseModel):
    """What a model allows of step caching, what its jobs get by default, and its schedules for the levels.

    `allowed` are levels, and `schedule` for schedules in requests.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    default: Choice = "off"
    allowed: tuple[Literal["light", "medium", "strong", "schedule"], ...] = ("light", "medium", "strong", "schedule")
    light: StepSchedule = CONSERVATIVE[CacheLevel.LIGHT]
    medium: StepSchedule = CONSERVATIVE[CacheLevel.MEDIUM]
    strong: StepSchedule = CONSERVATIVE[CacheLevel.STRONG]

    @model_validator(mode="after")
    def _default_is_allowed(self) -> StepCaching:
        if not self.allows(self.default):
            raise ValueError(f"default {self.default!r} is not among allowed")
        return self

    def allows(self, choice: Choice | StepSchedule) -> bool:
        return choice == "off" or ("schedule" if isinstance(choice, StepSchedule) else choice) in self.allowed

    def schedule_of(self, choice: Choice | StepSchedule | None) -> StepSchedule | None:
        """Return the schedule of a request's choice, or of the default; None to compute every step."""
        choice = self.default if choice is None else choice
        if isinstance(choice, StepSchedule) or choice == "off":
            return choice if isinstance(choice, StepSchedule) else None
        schedule: StepSchedule = getattr(self, choice)
        return schedule


def computed_steps(steps: int, schedule: StepSchedule | None) -> Sequence[int]:
    """Return the indexes of the steps that are computed, of `steps` in all."""
    if schedule is None or steps < FEWEST_STEPS:
        return range(steps)
    begin, end, every = schedule.first, steps - schedule.last, schedule.every
    return [step for step in range(steps) if not begin <= step < end or (step - begin) % every == 0]


def weights(known: Sequence[int], step: int) -> list[float]:
    """Return the weights of the outputs at the steps `known` in the extrapolation to `step`: Lagrange's polynomial."""
    result = []
    for one in known:
        weight = 1.0
        for other in known:
            if other != one:
                weight *= (step - other) / (one - other)
        result.append(weight)
    return result
