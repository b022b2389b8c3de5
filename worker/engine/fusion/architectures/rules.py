"""The vocabulary of stacking rules: what becomes of each argument when calls of one method are fused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property


class Kind(StrEnum):
    """What becomes of one argument when calls are fused."""

    STACKED = "stacked"  # dim 0 is rows; a dict, list or tuple is stacked leaf by leaf
    GROUPED = "grouped"  # as stacked, but with several entries a row, as many in all calls
    LISTED = "listed"  # a list with one entry a row, each of its own shape
    SHARED = "shared"  # a function of shapes only: that of the first call serves all
    ROWS = "rows"  # a number, a 0-dim tensor or one entry a row: becomes one entry a row, or several a row in all
    PADDED = "padded"  # as stacked, but dim 1 may differ: padded with zeros and masked
    MASK = "mask"  # the mask of a padded argument; made where the pipeline left it out
    EQUAL = "equal"  # must be the same in all calls
    SAME = "same"  # a tensor that must hold the same values in all calls: read once, which waits for the device
    REPEATED = "repeated"  # a list with one entry a row, all of them equal
    FORM = "form"  # whether the output is an object or a tuple: each call gets what it asked for
    CACHE = "cache"  # of keys and values: left out while it has no mode, and a call that uses one runs alone
    UNUSED = "unused"  # accepted by the signature and ignored by the code: left out


@dataclass(frozen=True)
class Argument:
    """One argument's rule. `dtype` is what ROWS and a made MASK are cast to; `mask` names a PADDED's mask.

    `like` names the argument whose value the code takes where this one is left out.
    """

    kind: Kind
    dtype: str | None = None
    mask: str | None = None
    like: str | None = None


@dataclass(frozen=True)
class StackingRules:
    """The rules of one method. `rows` names the argument whose length of dim 0 (or whose length) is the rows.

    An argument that is not named must be equal. `listed_output` says that the result is a list of one a row.
    """

    rows: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    listed_output: bool = False

    @cached_property
    def stand_ins(self) -> Mapping[str, str]:
        """The arguments that others stand for where they are left out, with the names of those."""
        return {name: rule.like for name, rule in self.arguments.items() if rule.like is not None}


Architectures = Mapping[str, Mapping[str, StackingRules]]  # class name -> method -> rules

STACKED = Argument(Kind.STACKED)
GROUPED = Argument(Kind.GROUPED)
LISTED = Argument(Kind.LISTED)
SHARED = Argument(Kind.SHARED)
ROWS = Argument(Kind.ROWS)
SAME = Argument(Kind.SAME)
REPEATED = Argument(Kind.REPEATED)
FORM = Argument(Kind.FORM)
CACHE = Argument(Kind.CACHE)
UNUSED = Argument(Kind.UNUSED)
