"""Random batch mates, schedulers, sizes, joins and cancels, over 24 seeds a family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from parity.more import mates
from parity.more.mixtures import FAMILIES
from tiny import registry

SEEDS = range(24)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.parity_more, pytest.mark.timeout(600)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.tiny)
def test_random_batch_mates_change_no_image(
    family: mates.Mixed, models_folder: Path, keep_mates: Callable[[str, object], None]
) -> None:
    """Images equal those of plain diffusers; reproducible ones have the same bits with other batch mates."""
    if registry.needs_torchvision(family.tiny) and (fault := registry.torchvision_fault()):
        pytest.skip(fault)
    mingled = mates.run(family, models_folder / family.tiny, SEEDS)
    assert mingled.reproduced, "no seed drew a reproducible job"
    assert mingled.shared, "no job shared a forward"
    keep_mates(family.tiny, mingled)
