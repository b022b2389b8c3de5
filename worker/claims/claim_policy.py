"""What a worker claims, and how long it pauses: pure functions of what runs and waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.job import Job
from shared.job_fields import Priority
from shared.queue.script_arguments import Models
from shared.runtime.backoff import backoff_s

MAX_PAUSE_S = 2.0
MIN_PAUSE_S = 0.05
MAX_BACKOFF_S = 1.0
PAUSE_PER_WORKER_S = 0.5
MAX_FLEET_PAUSE_S = 30.0
UNKNOWN_LOAD_S = 10.0
MAX_LOAD_S = 60.0
FAILED_LOAD_MS = -round(1000 * MAX_LOAD_S)
HINT_TTL_S = 2.0


class Listing(NamedTuple):
    """What wakes a waiting worker: jobs of `signature`; if idle all jobs of `models`, otherwise interactive ones."""

    signature: str | None
    idle: bool
    models: Models


class Wait(NamedTuple):
    """A pause of a worker that is listed for wake-ups, after an attempt that found nothing queued."""

    listing: Listing
    wakeups: int  # received before
    until_s: float

    def left_s(self, listing: Listing, wakeups: int, now_s: float) -> float:
        """Return how long the pause goes on, in seconds, if the worker waits for the same as before: then free slots
        make no job claimable, and a job that is queued sends a wake-up."""
        same = listing == self.listing and wakeups == self.wakeups
        return max(0.0, self.until_s - now_s) if same else 0.0


def longest_pause_s(ready_in_ms: int | None, waiting: int, fruitless: int, delay_s: float = 0.0) -> float:
    """Return for how long a worker without a wake-up pauses before it tries to claim again, at most.

    `waiting` workers together try about twice a second. For jobs that a lost wake-up leaves, heartbeats wake a worker
    again (`wakeups.lua`). `ready_in_ms`: until jobs are ready, None without queued ones. Where they are ready and were
    not claimed, `fruitless` times since the last wake-up, another worker was faster, or they cannot run now.
    """
    share_s = min(PAUSE_PER_WORKER_S * waiting, MAX_FLEET_PAUSE_S)
    longest_s = max(MAX_PAUSE_S, share_s)
    if ready_in_ms is None:
        return longest_s
    if ready_in_ms > 0:
        return min(ready_in_ms / 1000 + delay_s, longest_s)
    return backoff_s(fruitless + 1, MIN_PAUSE_S * max(1, waiting), max(MAX_BACKOFF_S, share_s))


@dataclass(frozen=True)
class RunningJob:
    """A job that occupies slots of this worker."""

    signature: str
    slots: int
    interactive: bool = False


@dataclass(frozen=True)
class ClaimRequest:
    """Up to `slots` slots of `signature`, or of any ready signature where that is None."""

    signature: str | None
    slots: int
    min_priority: Priority = Priority.BULK


def running_signature(running: Sequence[RunningJob]) -> str:
    """Return the signature that the engine runs now; others are preempted. `running` is in order of arrival."""
    return next((job for job in running if job.interactive), running[0]).signature


def claim_requests(
    running: Sequence[RunningJob], batch_slots: int, max_batch: int, max_preempted: int
) -> list[ClaimRequest]:
    """Return what to claim, in order: the first request that returns jobs ends the attempt.

    `batch_slots` of the running signature fit into a forward; `max_batch` is the largest batch of any signature.

    - While all jobs are of one signature, its free slots are open to all priorities.
    - Interactive jobs of the running signature may use each slot of a forward that no interactive job holds: free slots
      first, then those of other jobs, of which they preempt up to `max_preempted`.
    - Interactive jobs of another signature are claimed while none runs and at most `max_preempted` slots are in use.
    """
    if not running:
        return [ClaimRequest(None, max_batch)]
    signature = running_signature(running)
    used = sum(job.slots for job in running)
    own = sum(job.slots for job in running if job.signature == signature)
    interactive = sum(job.slots for job in running if job.interactive)
    requests = []
    if used == own < batch_slots:
        requests.append(ClaimRequest(signature, batch_slots - used))
    free, with_preemption = batch_slots - own, batch_slots + max_preempted - used
    if (slots := min(batch_slots - interactive, max(free, with_preemption))) > 0:
        requests.append(ClaimRequest(signature, slots, Priority.INTERACTIVE))
    if not interactive and used <= max_preempted:
        requests.append(ClaimRequest(None, max_batch, Priority.INTERACTIVE))
    return requests


def likely_requests(wanted: Sequence[ClaimRequest], *, interactive: bool, emptied: str | None) -> list[ClaimRequest]:
    """Return the requests that can return jobs: those for interactive jobs only if such jobs can be queued.

    `emptied`: a signature in which the last join left no job that fits.
    """

    def is_likely(request: ClaimRequest) -> bool:
        if request.min_priority is Priority.INTERACTIVE:
            return interactive
        return emptied is None or request.signature != emptied

    return [one for one in wanted if is_likely(one)]


def emptied_signature(request: ClaimRequest, claimed_slots: Sequence[int]) -> str | None:
    """Return the signature of a join of all priorities that left slots free; None for another request.

    A new batch can be smaller than requested although more jobs are queued.
    """
    if request.min_priority is Priority.INTERACTIVE or sum(claimed_slots) >= request.slots:
        return None
    return request.signature


def preempted_tenants(running: Iterable[Job], min_priority: Priority) -> set[str]:
    """Return the tenants of the running jobs that claimed ones would preempt: only interactive jobs preempt others."""
    if min_priority is not Priority.INTERACTIVE:
        return set()
    return {job.tenant for job in running if job.priority is not Priority.INTERACTIVE}


def load_times_ms(
    models: Sequence[str], loaded: Collection[str], measured_s: Mapping[str, float], failed: Collection[str] = ()
) -> dict[str, int]:
    """Return the load time of each model in ms: 0 for a loaded one, `FAILED_LOAD_MS` if its last load failed.

    A model never loaded here counts as the mean of the measured ones, or `UNKNOWN_LOAD_S`. Times are capped at
    `MAX_LOAD_S`, since jobs wait for as long as some loads take. `FAILED_LOAD_MS` ranks like the cap, so that a
    worker that can load the model gets its jobs.
    """
    unknown_s = sum(measured_s.values()) / len(measured_s) if measured_s else UNKNOWN_LOAD_S
    seconds = {model: min(MAX_LOAD_S, measured_s.get(model, unknown_s)) for model in models}
    times = {model: 0 if model in loaded else max(1, round(1000 * seconds[model])) for model in models}
    return times | {model: FAILED_LOAD_MS for model in models if model in failed and times[model]}


class InteractiveHint:
    """Cached hint whether interactive jobs can be queued. Saves a full worker most of its requests to Redis.

    Set when this worker is listed as waiting while some are queued; cleared when the queue has none, for `HINT_TTL_S`
    only: a model can be loaded in the meantime.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cleared_at = float("-inf")
        self.count = 0

    @property
    def likely(self) -> bool:
        return self._clock() - self._cleared_at >= HINT_TTL_S

    def set(self) -> None:
        self.count += 1
        self._cleared_at = float("-inf")

    def clear(self, seen: int) -> None:
        """Record that the queue had none, unless a hint came after the `seen` ones known at the request."""
        if seen == self.count:
            self._cleared_at = self._clock()
