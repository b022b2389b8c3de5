"""What the tests know of a model family: a module each, found by itself.

A module has `PIPELINES`, which build tiny pipelines of the real classes by name, `CALLS`, what the documented call of
each class takes besides prompt, steps and generator, and `ROWS` of the second grid. With `NEEDS_TORCHVISION = True` its
rows are skipped without torchvision. (`tiny.registry` lists those of the families before it.)
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


@cache
def modules() -> tuple[ModuleType, ...]:
    return tuple(import_module(f"{__name__}.{name}") for name in sorted(one.name for one in iter_modules(__path__)))
