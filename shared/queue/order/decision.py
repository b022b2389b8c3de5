"""What a worker claims, as the script `take` reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Overtakes:
    """What a batch overtakes by its deadline: signatures and their ranks; and the rank in which its own signature was
    overtaken often enough, None if it was not."""

    signatures: Sequence[tuple[str, int]] = ()
    had_turn: int | None = None


class ChosenJob(NamedTuple):
    """A job to claim; of a stream (`place` is "lane"), another one of its lane will do."""

    id: str
    epoch: int
    place: str
    rank: int
    tenant: str
    slots: int


ROWS = ("take", "skip", "held_up", "wait_for", "remove", "overtaken_jobs")


@dataclass
class Decision:
    """The jobs to claim, to skip, held up by their tenants' limits, to keep slots free for, and to remove from
    their place, each a row that begins with its id and its epoch; the jobs of a stream that jobs with a deadline
    overtake."""

    overtakes: Overtakes = Overtakes()
    take: list[ChosenJob] = field(default_factory=list)
    skip: list[tuple[str, int]] = field(default_factory=list)
    held_up: list[tuple[str, int]] = field(default_factory=list)
    wait_for: list[tuple[str, int]] = field(default_factory=list)
    remove: list[tuple[str, int]] = field(default_factory=list)
    overtaken_jobs: list[str] = field(default_factory=list)

    @property
    def changes_jobs(self) -> bool:
        return any(getattr(self, name) for name in ROWS)

    def wire(self, bulk_models: Sequence[str], bulk_growth: float) -> str:
        """Return the JSON for the script; each slot above bulk adds `bulk_growth` to the credit of `bulk_models`."""
        overtakes = {"signatures": self.overtakes.signatures, "had_turn": self.overtakes.had_turn}
        jobs = {name: getattr(self, name) for name in ROWS}
        credit = {"bulk_models": bulk_models, "bulk_growth": bulk_growth}
        return json.dumps({"overtakes": overtakes, **jobs, **credit}, separators=(",", ":"))
