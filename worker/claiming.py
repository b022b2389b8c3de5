"""Decisions of a worker, as pure functions: the clock and everything measured is passed in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shared.job import Priority

PAYING_GAIN = 0.05
"""By what share a further row must cost less than those before it. The published 1024² curve, which gains 2% from
rows, stays below it; small shapes on a CPU, at 12%, stay above it on a noisy machine too."""

UNKNOWN_LOAD_S = 10.0
LONGEST_LOAD_S = 60.0


def efficient_rows(curve: Mapping[int, float], cap: int, gain: float = PAYING_GAIN) -> int:
    """Return the most rows a forward should have: where one more no longer pays, or `cap`.

    `curve` holds measured seconds per forward by rows. With r rows a row costs s(r)/r; from a to b rows each further
    one costs (s(b) - s(a)) / (b - a). They pay where that is at least `gain` below what a row costs already. A count
    is compared with one of at most half of it that pays: between counts nearer to each other a hiccup decides. One
    that does not pay ends nothing, as a larger one may. Beyond the largest measured count nothing is known: up to
    twice of it is tried.
    """
    measured = sorted(rows for rows in curve if 0 < rows <= cap)
    if not measured:
        return cap
    paying: list[int] = []
    for rows in measured:
        half = max((fewer for fewer in paying if 2 * fewer <= rows), default=None)
        if half is None or (curve[rows] - curve[half]) / (rows - half) <= (1 - gain) * curve[half] / half:
            paying.append(rows)
    return min(cap, 2 * paying[-1]) if paying[-1] == measured[-1] else paying[-1]


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
