"""Selects the calls of the next forward: a pure policy, and the selector that applies it to the engine's jobs."""

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple

from shared.job import Priority
from worker.engine.fusion.fused_call import fixed_position
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ParkedCall, Stage
from worker.engine.scheduling.engine_job import EngineJob
from worker.engine.scheduling.memory_limits import ForwardKind, MemoryLimits
from worker.engine.scheduling.timing import ForwardTimer

MAX_SLOWDOWN = 0.05
"""The share by which bulk rows can lengthen an interactive job's forwards: by one step in total if it has 20."""

# Pixels decoded together: the activations of a VAE grow with the pixels of all rows.
MAX_DECODE_PIXELS = 4 * 1024 * 1024


class Candidate(NamedTuple):
    """What the policy knows of one parked call.

    Calls of one `batch_group` can be batch mates. Lower `priority_rank` and `arrival` run first. `stage` orders the
    work of one group. Calls with equal `batch_key` can share a forward, unless they need the same `position` in it.
    """

    batch_group: Hashable
    priority_rank: int
    arrival: int
    stage: int
    batch_key: Hashable
    position: int | None = None

    @property
    def order(self) -> tuple[int, int]:
        return (self.priority_rank, self.arrival)


def aged_rank(priority_rank: int, preempted_s: float, aging_s: float) -> int:
    """Return the priority rank of a job that was preempted for `preempted_s` in total.

    Each `aging_s` raises it permanently by one priority. It then runs before all younger jobs and finishes, instead of
    being preempted at every step.
    """
    return max(0, priority_rank - int(preempted_s / aging_s))


def select_calls(candidates: Sequence[Candidate], limit: Callable[[Sequence[int], int], int]) -> list[int]:
    """Return the indexes of the calls to run next in their order, at least one.

    The batch group of the first call runs and other groups wait until it is done: groups that do not fuse run one
    after the other, not in turns. In the group the earliest stage runs, and there the calls that share a batch key
    with the first, up to `limit(indexes, own)`: `indexes` are in order, and `own` of them are no fillers. The stage
    is chosen without looking at fillers. The other calls are preempted for now.
    """
    first = min(candidates, key=lambda call: call.order)
    group = [at for at, call in enumerate(candidates) if call.batch_group == first.batch_group]
    stage = min(candidates[at].stage for at in group if not is_filler(candidates[at], first))
    ordered = sorted((at for at in group if candidates[at].stage == stage), key=lambda at: candidates[at].order)
    key = candidates[ordered[0]].batch_key
    matching = _one_per_position(candidates, [at for at in ordered if candidates[at].batch_key == key])
    own = sum(not is_filler(candidates[at], first) for at in matching)
    return matching[: max(1, limit(matching, own))]


def is_filler(call: Candidate, first: Candidate) -> bool:
    """Return whether a call is bulk and the first interactive, so that it must not slow the forward down."""
    return first.priority_rank == Priority.INTERACTIVE.rank and call.priority_rank >= Priority.BULK.rank


def free_fillers(own: int, fillers: int, seconds: Callable[[int], float | None]) -> int:
    """Return how many of `fillers` can join `own` calls without slowing them down by more than `MAX_SLOWDOWN`.

    `seconds(rows)` is the learned time of a forward, None if unknown. The forward of `own` calls is measured first;
    then twice as many fillers as are known to be free, plus one, are tried.
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

    job: EngineJob
    task: ImageTask
    parked: ParkedCall

    @property
    def kind(self) -> ForwardKind:
        """What the time and memory of the forward depend on, apart from the number of calls."""
        method = self.parked.shared_method.name
        return ForwardKind(self.job.spec.id, self.job.shape, f"{method} of previews" if self.parked.preview else method)

    @property
    def padded_calls(self) -> int | None:
        """The number of calls that the forward is padded to, None for no padding."""
        rows = self.job.padded_calls
        return None if rows is None else min(rows, self.decode_limit or rows)

    @property
    def position(self) -> int | None:
        """The call's position in a padded forward."""
        if self.padded_calls is None:
            return None
        return fixed_position(self.job.request.job, self.job.tasks.index(self.task), self.padded_calls)

    @property
    def decode_limit(self) -> int | None:
        """How many images of this size can be decoded together, None for another call."""
        job = self.job.request.job
        decodes = self.parked.shared_method.component == "vae"
        return max(1, MAX_DECODE_PIXELS // (job.width * job.height * job.frames)) if decodes else None


class CallSelector:
    """Selects the calls of the next forward, and records at the jobs who was preempted and why batches were small."""

    def __init__(self, timer: ForwardTimer, memory: MemoryLimits, aging_s: float) -> None:
        self._timer = timer
        self._memory = memory
        self._aging_s = aging_s

    def select(self, jobs: Collection[EngineJob]) -> list[TaskCall]:
        """Return the calls of the next forward; empty if no call is parked."""
        parked = [TaskCall(job, task, task.call) for job in jobs for task in job.tasks if task.call is not None]
        if not parked:
            return []
        now = time.monotonic()
        candidates = [self._candidate(call, now) for call in parked]
        indexes = select_calls(candidates, lambda matching, own: self._limit([parked[at] for at in matching], own))
        selected = [parked[at] for at in indexes]
        _record_preemption(jobs, selected, now)
        _record_mismatches(parked, candidates, selected, candidates[indexes[0]])
        return selected

    def _candidate(self, task_call: TaskCall, now: float) -> Candidate:
        job, call = task_call.job, task_call.parked
        rank = aged_rank(job.priority_rank, job.preempted_s(now), self._aging_s)
        key = call.batch_key if job.padded_calls is None else call.exact_batch_key
        return Candidate(job.batch_group, rank, job.arrival, call.shared_method.stage, key, task_call.position)

    def _limit(self, calls: Sequence[TaskCall], own: int) -> int:
        """Return how many of `calls` can run together; those after the first `own` are fillers."""
        first = calls[0]
        if first.padded_calls is not None:
            return first.padded_calls
        limit = min(self._memory.allowed(first.kind, first.job.spec.max_batch), len(calls))
        limit = min(limit, first.decode_limit or limit)
        if own >= limit:
            return limit
        return own + free_fillers(own, limit - own, lambda rows: self._timer.learned_s((*first.kind, rows)))


def _record_preemption(jobs: Collection[EngineJob], selected: Sequence[TaskCall], now: float) -> None:
    keys = {call.job.key for call in selected}
    rank = min(call.job.priority_rank for call in selected)
    for job in jobs:
        job.set_preempted(job.started and job.key not in keys and job.priority_rank > rank, now)


def _record_mismatches(
    parked: Sequence[TaskCall], candidates: Sequence[Candidate], selected: Sequence[TaskCall], first: Candidate
) -> None:
    if first.stage != Stage.DENOISE or len(selected) == len(parked):
        return
    keys = {call.job.key for call in selected}
    for (job, _, _), candidate in zip(parked, candidates, strict=True):
        if candidate.batch_group != first.batch_group or candidate.stage != first.stage or job.key in keys:
            continue
        excluded = is_filler(candidate, first)
        job.mismatched |= not excluded
        for call in selected:
            call.job.excluded_bulk |= excluded
            call.job.mismatched |= not excluded
