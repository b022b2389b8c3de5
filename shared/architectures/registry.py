"""The families of `shared.families`, and the tables of class names that others read.

Each stacking rule is verified twice: by the parity test of its architecture, and by the self-check when a model is
loaded. A denoiser without rules is tried with inferred ones; any other class runs unfused.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from shared import families
from shared.architectures.family import ControlNet, Denoiser, Encoder, Family, KnownCheckpoint
from shared.architectures.stacking_rules import Methods
from shared.tasks import Task

Key = TypeVar("Key")
Value = TypeVar("Value")


def merged(tables: Iterable[Mapping[Key, Value]]) -> Mapping[Key, Value]:
    """Return the entries of all tables; raises `ValueError` for one that two of them have."""
    entries: dict[Key, Value] = {}
    for table in tables:
        if both := entries.keys() & table.keys():
            raise ValueError(f"two families declare {', '.join(sorted(map(str, both)))}")
        entries |= table
    return entries


_MODULES = sorted(module.name for module in iter_modules(families.__path__))
FAMILIES: Mapping[str, Family] = {name: import_module(f"{families.__name__}.{name}").FAMILY for name in _MODULES}
"""Families by the name of their module."""

_DENOISERS: Mapping[str, Denoiser] = merged(family.denoisers for family in FAMILIES.values())
_ENCODERS: Mapping[str, Encoder] = merged(family.encoders for family in FAMILIES.values())

CONTROL_NETS: Mapping[str, tuple[ControlNet, ...]] = {
    name: (one.control_net, *one.other_nets) for name, one in _DENOISERS.items() if one.control_net is not None
}
"""Control nets by denoiser."""

ARCHITECTURES: Mapping[str, Methods] = merged(
    (
        {name: one.methods for name, one in _DENOISERS.items() if one.methods},
        {net.name: net.methods for nets in CONTROL_NETS.values() for net in nets},
        {name: one.methods for name, one in _ENCODERS.items() if one.methods},
    )
)
"""Stacking rules by class."""

PACKED = frozenset(name for name, one in _DENOISERS.items() if one.packed)
# They take images as a list and mask the padding: rows of several sizes share forwards.
LIST_DENOISERS = frozenset(
    name for name, one in _DENOISERS.items() if any(rules.lists_rows for rules in one.methods.values())
)
CONTROLS_PER_ROW = frozenset(name for name, one in _DENOISERS.items() if one.controls_per_row)
SPLIT_DENOISERS = frozenset(name for name, one in _DENOISERS.items() if one.split)
WEIGHTED_PROMPTS = frozenset(name for name, one in _DENOISERS.items() if one.weighted_prompts)
ADAPTERS_PER_ROW = frozenset(
    {name for name, one in _DENOISERS.items() if one.adapters_per_row}
    | {name for name, one in _ENCODERS.items() if one.adapters_per_row}
)
DIVISIBLE = frozenset(name for name, one in _ENCODERS.items() if one.divisible)
CHECKPOINT_MARKS: Mapping[str, tuple[str, ...]] = {
    name: one.checkpoint_marks for name, one in _DENOISERS.items() if one.checkpoint_marks
}
SIBLINGS: Mapping[tuple[str, Task], str] = merged(family.siblings for family in FAMILIES.values())
CONTROL_PIPELINES: Mapping[str, str] = merged(family.control_pipelines for family in FAMILIES.values())
DENOISING_PARTS = frozenset[str]().union(*(family.denoising_parts for family in FAMILIES.values()))
FIXED_RATES: Mapping[str, int] = merged(family.fixed_rates for family in FAMILIES.values())
UPSCALERS: Mapping[str, tuple[float, ...]] = merged(family.upscalers for family in FAMILIES.values())
TILED = frozenset[str]().union(*(family.tiled for family in FAMILIES.values()))
LISTED_IMAGES = frozenset[str]().union(*(family.listed_images for family in FAMILIES.values()))
_DENOISER_MARKS = frozenset(mark for marks in CHECKPOINT_MARKS.values() for mark in marks)
_KNOWN = (one for family in FAMILIES.values() for one in family.checkpoints)
# Marks of denoisers before those of text encoders, which say less.
CHECKPOINTS: tuple[KnownCheckpoint, ...] = tuple(sorted(_KNOWN, key=lambda one: one.mark not in _DENOISER_MARKS))
