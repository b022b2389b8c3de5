"""The candidates of an engine job: which of its image tasks still run, and what was dropped when."""

from __future__ import annotations

from collections.abc import Sequence

from shared.config.candidates import DroppedCandidate, Verdict, judge
from worker.engine.fusion.image_task import ImageTask


class JobCandidates:
    """Compares the candidates of a job once all that run wait at the same step. They have the numbers of their tasks.

    `kept` are those that run, the best of the last comparison first; `is_settled` once as many are left as are kept.
    """

    def __init__(self, candidates: int, keep: int) -> None:
        self._keep = keep
        self.kept = tuple(range(candidates))
        self.scores: dict[int, float | None] = {}
        self.dropped: list[DroppedCandidate] = []

    @property
    def is_settled(self) -> bool:
        return len(self.kept) == self._keep

    def compare(self, tasks: Sequence[ImageTask]) -> Verdict | None:
        """Return which candidates go on; None while one has not reached the step."""
        waiting = {number: tasks[number].scored_step for number in self.kept}
        reached = {number: scored for number, scored in waiting.items() if scored is not None}
        if len(reached) < len(waiting):
            return None
        self.scores = {number: scored.score for number, scored in reached.items()}
        verdict = judge(self.scores, next(scored.left for scored in reached.values()))
        for number in verdict.dropped:
            dropped = DroppedCandidate(candidate=number, step=reached[number].step, score=self.scores[number])
            self.dropped.append(dropped)
        self.kept = verdict.kept
        return verdict
