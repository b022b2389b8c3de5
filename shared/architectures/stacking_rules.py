"""Stacking rules: what happens to each argument when calls of one method are fused. Plain data, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property


class Kind(StrEnum):
    """How the values of one argument are combined."""

    STACKED = "stacked"  # dim 0 is rows; a dict, list or tuple is stacked leaf by leaf
    FRESH = "fresh"  # stacked; new tensors at each call, so that joined ones are not kept
    ADDED = "added"  # fresh tensors that the model adds to its own; zeros for calls without them
    GROUPED = "grouped"  # stacked, with several entries per row, the same number in all calls
    LAYERED = "layered"  # stacked along dim 1; dim 0 is layers of an encoder
    LISTED = "listed"  # a list with one entry per row, each of its own shape, or a list of such
    SHARED = "shared"  # a function of shapes only: the first call's value serves all
    ROWS = "rows"  # a number, a 0-dim tensor or one entry per row: becomes one entry per row
    PADDED = "padded"  # stacked, dim 1 can differ: padded with zeros and masked; a list or dict by entry
    MASK = "mask"  # the mask of a padded argument; created where the pipeline omits it
    JOINT_MASK = "joint_mask"  # {"attention_mask": [rows, 1, 1, keys]} of a padded argument, followed by the samples
    LONGEST = "longest"  # a function of the length of a padded argument: the value of the longest call serves all
    EQUAL = "equal"  # must be the same in all calls
    SAME = "same"  # tensors with the same values in all calls; comparing them waits once for the device
    REPEATED = "repeated"  # a list with one entry per row, all equal
    FORM = "form"  # whether the output is an object or a tuple: each call gets the form it asks for
    CACHE = "cache"  # of keys and values: omitted while it has no mode; a call that uses one runs solo
    UNUSED = "unused"  # accepted by the signature, ignored by the code: omitted


@dataclass(frozen=True)
class Argument:
    """Rule of one argument.

    `dtype` is the dtype of ROWS and of a created MASK; `mask` names the mask of a PADDED tensor; `like` names the
    argument that gives the value when this one is omitted.
    """

    kind: Kind
    dtype: str | None = None
    mask: str | None = None
    like: str | None = None


STACKED = Argument(Kind.STACKED)
FRESH = Argument(Kind.FRESH)
ADDED = Argument(Kind.ADDED)
GROUPED = Argument(Kind.GROUPED)
LAYERED = Argument(Kind.LAYERED)
LISTED = Argument(Kind.LISTED)
LONGEST = Argument(Kind.LONGEST)
PADDED = Argument(Kind.PADDED)
JOINT_MASK = Argument(Kind.JOINT_MASK)
SHARED = Argument(Kind.SHARED)
ROWS = Argument(Kind.ROWS)
EQUAL = Argument(Kind.EQUAL)
SAME = Argument(Kind.SAME)
REPEATED = Argument(Kind.REPEATED)
FORM = Argument(Kind.FORM)
CACHE = Argument(Kind.CACHE)
UNUSED = Argument(Kind.UNUSED)


@dataclass(frozen=True)
class StackingRules:
    """Rules of one method. Argument `rows` has one entry per row; an argument without a rule is EQUAL.

    With `listed_output` the result is a list with one entry per row. Not `exact`: the last bits of a row can depend on
    the other rows, as in a model that pads to the longest prompt of them; reproducible jobs do not use such rules.
    """

    rows: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    listed_output: bool = False
    exact: bool = True

    @property
    def lists_rows(self) -> bool:
        """Return whether rows are entries of a list, which can differ in shape."""
        return self.arguments[self.rows].kind is Kind.LISTED

    @cached_property
    def substitutes(self) -> Mapping[str, str]:
        """Names of arguments that can be omitted, with the argument that is used instead."""
        return {name: rule.like for name, rule in self.arguments.items() if rule.like is not None}


Methods = Mapping[str, StackingRules]


# Integers or floats, depending on the noise scheduler; embedded as float32 in both cases.
TIMES = Argument(Kind.ROWS, dtype="float32")


def rules_for(rows: str, *stacked: str, exact: bool = True, **others: Argument) -> StackingRules:
    """Return rules that stack `rows` and `stacked`; `others` are the rules of other arguments."""
    return StackingRules(rows, {**dict.fromkeys((rows, *stacked), STACKED), **others}, exact=exact)


def forward(rows: str, *stacked: str, exact: bool = True, **others: Argument) -> Methods:
    return {"forward": rules_for(rows, *stacked, exact=exact, **others)}


VAE: Methods = {"encode": rules_for("x"), "decode": rules_for("z")}
