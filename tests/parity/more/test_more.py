"""Families beyond the listed ones: jobs share forwards or run solo, and every result equals plain diffusers' own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from parity.more.families import Family
from parity.more.grid import GRID
from parity.more.running import run
from tiny.registry import torchvision_fault

# Many of these classes are old, and their libraries warn of it.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("shared_models")]


def _params() -> list[object]:
    return [pytest.param(one, id=one.tiny, marks=[] if one.quick else pytest.mark.parity_more) for one in GRID]


@pytest.mark.parametrize("family", _params())
def test_every_image_equals_that_of_plain_diffusers(
    family: Family, models_folder: Path, keep_more: Callable[[str, object], None]
) -> None:
    """Whether its jobs share forwards or not: no batch mate changes a result."""
    if family.needs_torchvision and (fault := torchvision_fault()):
        keep_more(family.tiny, fault)
        pytest.skip(fault)
    keep_more(family.tiny, run(family, models_folder / family.tiny))
