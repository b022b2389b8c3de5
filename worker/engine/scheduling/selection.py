"""Selects the calls of the next forward: a pure policy, and the selector that applies it to the engine's jobs."""

import math
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple

from shared.job_fields import Priority
from worker.engine.fusion.fused_call import fixed_position
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ParkedCall, Stage
from worker.engine.pipelines.decode_pieces import decode_limit, is_piece
from worker.engine.scheduling.engine_job import EngineJob
from worker.engine.scheduling.memory_limits import ForwardKind, MemoryLimits
from worker.engine.scheduling.timing import ForwardTimer

MAX_SLOWDOWN = 0.05
"""The share by which bulk rows can lengthen an interactive job's forwards: by one step in total if it has 20."""

AFTER_DENOISING = Stage.DENOISE + 1
"""The stage of a piece of a decode that lets a denoiser forward go first."""


class Candidate(NamedTuple):
    """What the policy knows of one parked call.

    Calls of one `batch_group` can be batch mates. Lower `priority_rank`, then `start_by_s`, the latest start, then
    `arrival` run first. `stage` orders the work of one group. Calls with equal `batch_key` can share a forward, unless
    they need the same `position` in it.
    """

    batch_group: Hashable
    priority_rank: int
    arrival: int
    stage: int
    batch_key: Hashable
    position: int | None = None
    start_by_s: float = math.inf

    @property
    def order(self) -> tuple[int, float, int]:
        return (self.priority_rank, self.start_by_s, self.arrival)


def aged_rank(priority_rank: int, preempted_s: float, aging_s: float) -> int:
    """Return the priority rank of a job that was preempted for `preempted_s` in total.

    Each `aging_s` raises it permanently by one priority. It then runs before all younger jobs and finishes, instead of
    being preempted at every step.
    """
    return max(0, priority_rank - int(preempted_s / aging_s))


def pieces_per_forward(piece_s: float | None, forward_s: float | None) -> int:
    """Return how many pieces of a decode run between two denoiser forwards: as long as one of these, at least one.

    So a decode delays a batch mate's next step by at most one step or one piece, and takes at most about twice as long.
    """
    if not piece_s or forward_s is None:
        return 1
    return max(1, int(forward_s / piece_s))


def select_calls(candidates: Sequence[Candidate], limit: Callable[[Sequence[int], int], int]) -> list[int]:
    """Return the indexes of the calls to run next in their order, at least one.

    The batch group of the first call runs and other groups wait until it is done: groups that do not fuse run one
    after the other, not in turns. In the group the earliest stage runs, and there the calls that share a batch key
    with the first, up to `limit(indexes, own)`: `indexes` are in order, and the first `own` are the group's calls that
    are no fillers. The stage is chosen without looking at fillers. The other calls are preempted for now.
    """
    first = min(candidates, key=lambda candidate: candidate.order)
    group = [at for at, candidate in enumerate(candidates) if candidate.batch_group == first.batch_group]
    stage = min(candidates[at].stage for at in group if not is_filler(candidates[at], first))
    ordered = sorted((at for at in group if candidates[at].stage == stage), key=lambda at: candidates[at].order)
    key = candidates[ordered[0]].batch_key
    matching = _one_per_position(candidates, [at for at in ordered if candidates[at].batch_key == key])
    own = sum(not is_filler(candidates[at], first) for at in matching)
    return matching[: max(1, limit(matching, own))]


def is_filler(candidate: Candidate, first: Candidate) -> bool:
    """Return whether a call is bulk and the first interactive, so that it must not slow the forward down."""
    return first.priority_rank == Priority.INTERACTIVE.rank and candidate.priority_rank >= Priority.BULK.rank


def free_fillers(own: int, fillers: int, seconds: Callable[[int], float | None]) -> int:
    """Return how many of `fillers` can join `own` calls without slowing them down by more than `MAX_SLOWDOWN`.

    `seconds(rows)` is the learned time of a forward, None if unknown. The forward of `own` calls is measured first,
    then one with 1, 3, 7, ... fillers, until it is slower than that.
    """
    own_s, free = seconds(own), 0
    while own_s is not None and free < fillers:
        tried = min(fillers, 2 * free + 1)
        tried_s = seconds(own + tried)
        if tried_s is None:
            return tried
        if tried_s > (1 + MAX_SLOWDOWN) * own_s:
            break
        free = tried
    return free


def _one_per_position(candidates: Sequence[Candidate], indexes: Sequence[int]) -> list[int]:
    taken: set[int | None] = set()
    selected = []
    for at in indexes:
        position = candidates[at].position
        if position is None or position not in taken:
            selected.append(at)
            taken.add(position)
    return selected


class TaskCall(NamedTuple):
    """An image task of a job, and the call at which it is parked."""

    engine_job: EngineJob
    task: ImageTask
    parked_call: ParkedCall

    @property
    def kind(self) -> ForwardKind:
        """What the time and memory of the forward depend on, apart from the number of calls."""
        job, method = self.engine_job, self.parked_call.shared_method.name
        return ForwardKind(job.spec.id, job.shape, f"{method} of previews" if self.parked_call.preview else method)

    @property
    def pad_to(self) -> int | None:
        """The number of calls that the forward is padded to, None for no padding."""
        calls = self.engine_job.pad_to
        return min(calls, self.decode_limit or calls) if calls is not None and self.parked_call.exact else None

    @property
    def position(self) -> int | None:
        """The call's position in a padded forward."""
        if self.pad_to is None:
            return None
        return fixed_position(self.engine_job.job, self.engine_job.tasks.index(self.task), self.pad_to)

    @property
    def decode_limit(self) -> int | None:
        """How many images of this size can be decoded together, None for another call."""
        return decode_limit(self.engine_job.job) if self.parked_call.shared_method.component == "vae" else None

    @property
    def is_piece(self) -> bool:
        """Whether the call decodes a piece of a large video or a mesh."""
        return is_piece(self.parked_call.shared_method)


class CallSelector:
    """Selects the calls of the next forward, and records in engine jobs their preemption and why batches were small."""

    def __init__(self, timer: ForwardTimer, memory: MemoryLimits, aging_s: float) -> None:
        self._timer = timer
        self._memory = memory
        self._aging_s = aging_s
        self._pieces = 0  # of decodes since the last denoiser forward, which is of kind `_last_forward`
        self._last_forward: Hashable = None

    def select(self, engine_jobs: Collection[EngineJob]) -> list[TaskCall]:
        """Return the calls of the next forward; empty if no call is parked."""
        parked = [
            TaskCall(engine_job, task, task.parked_call)
            for engine_job in engine_jobs
            for task in engine_job.tasks
            if task.parked_call is not None
        ]
        if not parked:
            return []
        now = time.monotonic()
        candidates = [self._candidate(task_call, now) for task_call in parked]
        indexes = select_calls(candidates, lambda matching, own: self._limit([parked[at] for at in matching], own))
        selected = [parked[at] for at in indexes]
        self._count_pieces(selected)
        _record_preemption(engine_jobs, selected, now)
        _record_mismatches(parked, candidates, selected, candidates[indexes[0]])
        return selected

    def _candidate(self, task_call: TaskCall, now: float) -> Candidate:
        engine_job, parked_call = task_call.engine_job, task_call.parked_call
        rank = aged_rank(engine_job.priority_rank, engine_job.preempted_s(now), self._aging_s)
        key = parked_call.batch_key if engine_job.pad_to is None else parked_call.exact_batch_key
        stage: int = parked_call.shared_method.stage
        if task_call.is_piece and self._pieces >= self._most_pieces(task_call):
            stage = AFTER_DENOISING
        position, start_by_s = task_call.position, engine_job.start_by_s
        return Candidate(engine_job.batch_group, rank, engine_job.arrival, stage, key, position, start_by_s)

    def _most_pieces(self, piece: TaskCall) -> int:
        piece_s, forward_s = self._timer.learned_s((*piece.kind, 1)), self._timer.learned_s(self._last_forward)
        return pieces_per_forward(piece_s, forward_s)

    def _count_pieces(self, selected: Sequence[TaskCall]) -> None:
        first = selected[0]
        if first.is_piece:
            self._pieces += 1
        elif first.parked_call.shared_method.stage is Stage.DENOISE:
            self._pieces, self._last_forward = 0, (*first.kind, len(selected))

    def _limit(self, task_calls: Sequence[TaskCall], own: int) -> int:
        """Return how many of `task_calls` can run together; those after the first `own` are fillers."""
        first = task_calls[0]
        if first.pad_to is not None:
            return first.pad_to
        limit = min(self._memory.allowed(first.kind, first.engine_job.spec.max_batch), len(task_calls))
        limit = min(limit, first.decode_limit or limit)
        if own >= limit:
            return limit
        return own + free_fillers(own, limit - own, lambda rows: self._timer.learned_s((*first.kind, rows)))


def _record_preemption(engine_jobs: Collection[EngineJob], selected: Sequence[TaskCall], now: float) -> None:
    keys = {task_call.engine_job.claim_key for task_call in selected}
    first = min((task_call.engine_job.priority_rank, task_call.engine_job.start_by_s) for task_call in selected)
    for engine_job in engine_jobs:
        waits = engine_job.started and engine_job.claim_key not in keys
        engine_job.set_preempted(waits and (engine_job.priority_rank, engine_job.start_by_s) > first, now)


def _record_mismatches(
    parked: Sequence[TaskCall], candidates: Sequence[Candidate], selected: Sequence[TaskCall], first: Candidate
) -> None:
    if first.stage != Stage.DENOISE or len(selected) == len(parked):
        return
    keys = {task_call.engine_job.claim_key for task_call in selected}
    for (engine_job, _, _), candidate in zip(parked, candidates, strict=True):
        if candidate.batch_group != first.batch_group or candidate.stage != first.stage or engine_job.claim_key in keys:
            continue
        excluded = is_filler(candidate, first)
        engine_job.mismatched |= not excluded
        for task_call in selected:
            task_call.engine_job.excluded_bulk |= excluded
            task_call.engine_job.mismatched |= not excluded
