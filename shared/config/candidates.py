"""Candidates of a job: more images than it keeps, of which a scorer drops the worst at some shares of the steps.

Plain data, without torch. How many go on is fixed before a job starts; which ones, the scores say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_MARKS = 8

Candidates = Annotated[int, Field(strict=True, ge=2, le=256, description="Images that begin; image i uses seed + i.")]
Kept = Annotated[int, Field(strict=True, ge=1, le=255, description="Images that are finished and returned.")]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
Shares = Annotated[
    tuple[Share, ...],
    Field(min_length=1, max_length=MAX_MARKS, description="Shares of the steps after which the worst are dropped."),
]


class BestOf(BaseModel):
    """Of so many `candidates` `keep` are finished; after each share `at` of the steps the worst are dropped.

    After each share the same part of them goes on, so that `keep` are left after the last.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidates: Candidates
    keep: Kept = 1
    at: Shares = (0.25, 0.5)

    @model_validator(mode="after")
    def _in_order(self) -> BestOf:
        if self.keep >= self.candidates:
            values = {"candidates": self.candidates, "keep": self.keep}
            raise PydanticCustomError("best_of", "keep must be below candidates {candidates}, not {keep}", values)
        if list(self.at) != sorted(set(self.at)):
            raise PydanticCustomError("best_of", "at: each share must be above the one before")
        return self

    @property
    def left(self) -> tuple[int, ...]:
        """How many go on after each share."""
        part = self.keep / self.candidates
        return tuple(
            max(self.keep, round(self.candidates * part ** (number / len(self.at))))
            for number in range(1, len(self.at) + 1)
        )

    def marks(self, steps: int) -> Mapping[int, int]:
        """Return how many go on after which of `steps` steps, the first being 1; of two shares of a step the later."""
        return {max(1, math.floor(share * steps + 1e-6)): left for share, left in zip(self.at, self.left, strict=True)}

    def mean_steps(self, steps: int) -> float:
        """Return how many of `steps` steps are computed for a candidate, on average."""
        computed, running, since = 0, self.candidates, 0
        for step, left in self.marks(steps).items():
            computed, running, since = computed + running * (step - since), left, step
        return (computed + running * (steps - since)) / self.candidates


class Verdict(NamedTuple):
    """Candidates by their numbers: those that go on, the best first, and the dropped ones, the worst first."""

    kept: tuple[int, ...]
    dropped: tuple[int, ...]


def judge(scores: Mapping[int, float | None], keep: int) -> Verdict:
    """Return which candidates go on by their scores; of equal scores the lower number does, and None is the worst."""

    def rank(candidate: int) -> tuple[float, int]:
        score = scores[candidate]
        return (math.inf if score is None else -score, candidate)

    ordered = sorted(scores, key=rank)
    return Verdict(tuple(ordered[:keep]), tuple(reversed(ordered[keep:])))


class DroppedCandidate(BaseModel):
    """A candidate that was dropped after `step`; without a `score` it had values that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: int
    step: int
    score: float | None = None


class ScorerSpec(BaseModel):
    """What scores the candidates of a model: a CLIP model in a folder, or on the hub.

    The score is the similarity of image and prompt; with a `head` it is that of the head, a safetensors file of linear
    layers on the embedding of the image.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    head: str | None = None

    @property
    def id(self) -> str:
        return self.source

    @property
    def variant(self) -> None:
        return None

    @property
    def is_folder(self) -> bool:
        return Path(self.source).is_absolute()

    @property
    def name(self) -> str:
        """What names its weights on every machine: of a folder its own name only."""
        own = Path(self.source).name if self.is_folder else self.source
        head = None if self.head is None else Path(self.head).name
        return "@".join(filter(None, (own, self.revision, head)))

    def resolve_path(self, folder: Path) -> ScorerSpec:
        """Return the spec with absolute paths: of a `source` that is a folder in `folder`, and of the head."""
        path = (folder / self.source).resolve()
        update: dict[str, object] = {"source": str(path)} if path.is_dir() else {}
        if self.head is not None:
            update["head"] = str((folder / self.head).resolve())
        return self.model_copy(update=update)


def _read_scorer(value: Any) -> Any:
    """Return the table of a scorer that is only named."""
    return {"source": value} if isinstance(value, str) else value


Scorer = Annotated[ScorerSpec | None, BeforeValidator(_read_scorer)]
