"""The families of models are found by themselves, and each class is that of one family."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import families
from shared.architectures.registry import FAMILIES, merged


def test_every_module_is_a_family() -> None:
    modules = {path.stem for path in Path(families.__path__[0]).glob("*.py")}
    assert modules - {"__init__"} == FAMILIES.keys()


def test_a_class_that_two_families_declare_is_refused() -> None:
    """The entry of one would silently replace that of the other."""
    assert merged(({"A": 1}, {"B": 2})) == {"A": 1, "B": 2}
    with pytest.raises(ValueError, match="two families declare B"):
        merged(({"A": 1, "B": 2}, {"B": 2}))
