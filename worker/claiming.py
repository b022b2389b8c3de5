"""Decisions of a worker, as pure functions: the clock and everything measured is passed in."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from shared.job import Priority

UNKNOWN_LOAD_S = 10.0
LONGEST_LOAD_S = 60.0
TRUSTED_S = 2.0


def loads_ms(
    models: Sequence[str], loaded: Collection[str], measured_s: Mapping[str, float], failed: Collection[str] = ()
) -> dict[str, int]:
    """Return how long loading takes of each model, in ms; 0 of one in memory, negative of one whose last load failed.

    What was never loaded here is taken for the mean of what was, and for `UNKNOWN_LOAD_S` where nothing was; none for
    more than `LONGEST_LOAD_S`, since its jobs may wait for as long as some loads take. One that failed counts for as
    much: whoever can load it is to have its jobs.
    """
    unknown_s = sum(measured_s.values()) / len(measured_s) if measured_s else UNKNOWN_LOAD_S
    seconds = {model: min(LONGEST_LOAD_S, measured_s.get(model, unknown_s)) for model in models}
    loads = {model: 0 if model in loaded else max(1, round(1000 * seconds[model])) for model in models}
    return loads | {model: -round(1000 * LONGEST_LOAD_S) for model in models if model in failed and loads[model]}


@dataclass(frozen=True)
class RunningJob:
    """A job that has seats on this worker."""

    signature: str
    seats: int
    interactive: bool = False
    solo: bool = False


@dataclass(frozen=True)
class ClaimRequest:
    """What to claim: up to so many seats of a signature, of any ripe one where that is None."""

    signature: str | None
    seats: int
    lowest: Priority = Priority.BULK


def leading(seated: Sequence[RunningJob]) -> str:
    """Return the signature whose jobs the engine runs, the others being set aside. `seated` is in order of arrival."""
    return next((one for one in seated if one.interactive), seated[0]).signature


def asks(seated: Sequence[RunningJob], rows: int, largest: int, aside: int) -> list[ClaimRequest]:
    """Return what to claim, in the order in which to try; nothing more once one of them gave something.

    `rows` of the leading signature go on together, `largest` is the most of any signature. While everything runs
    together the free seats are for all priorities. Beyond them there is room for interactive jobs: of the leading
    signature until they fill a forward, of another one while no interactive job runs. At most `aside` rows are set
    aside for them. A job that was lost has no company, and joins none.
    """
    if not seated:
        return [ClaimRequest(None, largest)]
    if any(one.solo for one in seated):
        return []
    mine = leading(seated)
    taken = sum(one.seats for one in seated)
    together = sum(one.seats for one in seated if one.signature == mine)
    interactive = sum(one.seats for one in seated if one.interactive)
    wanted = []
    if taken == together < rows:
        wanted.append(ClaimRequest(mine, rows - taken))
    room = min(rows - interactive, max(rows - together, rows + aside - taken))
    if room > 0:
        wanted.append(ClaimRequest(mine, room, Priority.INTERACTIVE))
    if not interactive and taken <= aside:
        wanted.append(ClaimRequest(None, largest, Priority.INTERACTIVE))
    return wanted


class InteractiveHint:
    """Likely from each hint that interactive jobs came, until the queue says that none waits.

    That is believed for `TRUSTED_S`: a hint may have been lost, and a model loaded since.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quiet_since = float("-inf")
        self.hints = 0
        """How many there were: what the queue is asked after one and answers before the next is worth nothing then."""

    def hint(self) -> None:
        """Note that interactive jobs may have come."""
        self.hints += 1
        self._quiet_since = float("-inf")

    def none_waits(self, hints: int) -> None:
        """Note that the queue has none, asked when there had been so many hints."""
        if hints == self.hints:
            self._quiet_since = self._clock()

    @property
    def likely(self) -> bool:
        """Whether to ask for interactive jobs."""
        return self._clock() - self._quiet_since >= TRUSTED_S
