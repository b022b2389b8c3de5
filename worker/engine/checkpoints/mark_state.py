"""What the candidates of a job have in common: the mark at which they were compared last, and the outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator

from shared.config.candidates import DroppedCandidate


class MarkState(BaseModel):
    """The candidates of a job after the mark at `step`, which is 0 before the first mark.

    `kept` are those that run, the best first, with their `scores` at that mark; before the first one there are none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: NonNegativeInt = 0
    kept: tuple[NonNegativeInt, ...]
    scores: tuple[float | None, ...] = ()
    dropped: tuple[DroppedCandidate, ...] = ()

    @model_validator(mode="after")
    def _is_whole(self) -> MarkState:
        if sorted((*self.kept, *self.dropped_steps)) != list(range(self.count)):
            raise ValueError("each candidate is either kept or dropped")
        if len(self.scores) != (len(self.kept) if self.step else 0):
            raise ValueError("after a mark each kept candidate has a score")
        return self

    @property
    def count(self) -> int:
        """How many candidates the job has begun with."""
        return len(self.kept) + len(self.dropped)

    @property
    def dropped_steps(self) -> Mapping[int, int]:
        """The step after which each candidate was dropped."""
        return {one.candidate: one.step for one in self.dropped}

    def score_of(self, candidate: int) -> float | None:
        """Return the score of a kept candidate at the last mark."""
        return self.scores[self.kept.index(candidate)]


def latest(states: Sequence[MarkState | None], count: int) -> MarkState | None:
    """Return the state of the last mark among the checkpoints of a job with `count` candidates; None without one.

    Runs that were not reproducible can have compared other images at the same mark: the first of their states counts.
    """
    own = [state for state in states if state is not None and state.count == count]
    return max(own, key=lambda state: state.step, default=None)
