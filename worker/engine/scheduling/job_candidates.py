"""The candidates of an engine job: which of its image tasks still run, and what was dropped when."""

from __future__ import annotations

from collections.abc import Sequence

from shared.config.candidates import DroppedCandidate, Verdict, judge
from worker.engine.checkpoints.mark_state import MarkState
from worker.engine.fusion.image_task import ImageTask


class JobCandidates:
    """Compares the candidates of a job once all that run wait at the same step. They have the numbers of their tasks.

    `state` is that after the last comparison, with which it can begin; `is_settled` once as many are left as are kept.
    """

    def __init__(self, candidates: int, keep: int) -> None:
        self._keep = keep
        self.state = MarkState(kept=tuple(range(candidates)))

    @property
    def is_settled(self) -> bool:
        return len(self.state.kept) == self._keep

    def compare(self, tasks: Sequence[ImageTask]) -> Verdict | None:
        """Return which candidates go on; None while one has not reached the step."""
        waiting = {number: tasks[number].scored_step for number in self.state.kept}
        reached = {number: scored for number, scored in waiting.items() if scored is not None}
        if len(reached) < len(waiting):
            return None
        scores, mark = {number: scored.score for number, scored in reached.items()}, next(iter(reached.values()))
        verdict = judge(scores, mark.left)
        dropped = [DroppedCandidate(candidate=one, step=mark.step, score=scores[one]) for one in verdict.dropped]
        self.state = MarkState(
            step=mark.step,
            kept=verdict.kept,
            scores=tuple(scores[one] for one in verdict.kept),
            dropped=(*self.state.dropped, *dropped),
        )
        return verdict
