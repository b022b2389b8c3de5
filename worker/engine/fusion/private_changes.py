"""Changes that a pipeline makes to shared modules during its call: kept private to its image task.

Perturbed attention guidance (PAG) replaces attention processors, other pipelines register hooks. A task's changes are
on the modules only while its own code runs, and during its own calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
_MISSING = object()


class _Slot(NamedTuple):
    """An entry of a module's dictionaries that pipelines change."""

    module: torch.nn.Module
    part: torch.nn.Module
    target: dict[Any, Any]
    key: Hashable
    value: Any


class Change(NamedTuple):
    """A changed entry of a part of `module`."""

    module: torch.nn.Module
    part: torch.nn.Module
    target: dict[Any, Any]
    key: Hashable
    before: Any
    after: Any

    @property
    def stateless_key(self) -> Hashable | None:
        """Equal for changes with equal effects in any call, such as new hooks without a state; None for others."""
        if self.before is not _MISSING:
            return None
        if isinstance(self.after, bool):
            return (id(self.target), self.after)
        stateless = isinstance(self.after, FunctionType) and not (self.after.__closure__ or self.after.__defaults__)
        return (id(self.target), self.after.__code__) if stateless else None


def put_on(changes: Iterable[Change]) -> None:
    for change in changes:
        _set(change, change.after)


def take_off(changes: Iterable[Change]) -> None:
    for change in changes:
        _set(change, change.before)


def _set(change: Change, value: Any) -> None:
    if value is _MISSING:
        change.target.pop(change.key, None)
    else:
        change.target[change.key] = value


@contextmanager
def applied(changes: Sequence[Change]) -> Iterator[None]:
    """Run the calls of a task with its changes."""
    put_on(changes)
    try:
        yield
    finally:
        take_off(changes)


def _entries(own: dict[str, Any]) -> Iterator[tuple[dict[Any, Any], Hashable]]:
    """Yield the entries of a module's attributes that pipelines change."""
    yield from ((own, key) for key in ("processor", "forward") if key in own)
    if "processor" in own["_modules"]:
        yield own["_modules"], "processor"
    for name in _HOOKS:
        hooks = own.get(name, {})
        yield from ((hooks, key) for key in hooks)


class ModuleWatch:
    """Finds the changes of a model's modules. All parts are watched at first; `settle` keeps those that have changed.

    Watching the 1,900 parts of XL's UNet takes about 4 ms at each switch to a task and back, so it is done in the
    self-check only.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module] | None = None) -> None:
        self.modules = tuple((modules or {}).values())
        self._parts = {id(part): (module, part) for module in self.modules for part in module.modules()}
        self._changed: set[int] = set()
        self.changed_modules: list[torch.nn.Module] = []  # by other changes than stateless hooks

    @property
    def idle(self) -> bool:
        return not self._parts

    def settle(self) -> None:
        """Watch from now on only what has changed so far."""
        self._parts = {key: self._parts[key] for key in self._changed}

    def read(self) -> dict[Hashable, _Slot]:
        """Return what pipelines can change, as it is now."""
        slots: dict[Hashable, _Slot] = {}
        for module, part in self._parts.values():
            own = part.__dict__
            hooked = own["_forward_hooks"] or own["_forward_pre_hooks"]
            if hooked or "processor" in own or "forward" in own or "processor" in own["_modules"]:
                for target, key in _entries(own):
                    slots[id(target), key] = _Slot(module, part, target, key, target[key])
        return slots

    def changes_since(self, before: Mapping[Hashable, _Slot]) -> list[Change]:
        """Return what a task's own code has changed, and take it off the modules."""
        after, changes = self.read(), []
        for at in dict.fromkeys((*before, *after)):
            old, new = before.get(at), after.get(at)
            slot = new or old
            values = [_MISSING if one is None else one.value for one in (old, new)]
            if slot is not None and values[0] is not values[1]:
                changes.append(Change(slot.module, slot.part, slot.target, slot.key, *values))
        self._record(changes)
        take_off(changes)
        return changes

    def _record(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._changed.add(id(change.part))
            if change.stateless_key is None and not any(change.module is module for module in self.changed_modules):
                self.changed_modules.append(change.module)
