"""Families beyond the listed ones: what is stopped at half of its steps continues in another process, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from parity.more.families import Family
from parity.more.grid import GRID
from parity.resuming import resumed_difference
from tiny.registry import torchvision_fault

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("shared_models")]

CHANGES = "its pipeline changes the denoiser"
MOMENTUM = "an image that continued was off"
RESTARTS: Mapping[str, str] = {
    **dict.fromkeys(("sag", "sd-pag", "sdxl-pag", "sd3-pag", "pixart-pag", "sana-pag", "animatediff-pag"), CHANGES),
    **dict.fromkeys(("ace-step", "hunyuan-image-2.1"), MOMENTUM),
    **dict.fromkeys(("wan-animate-2", "wan-animate-2-distilled"), "the check of its checkpoints failed"),
    "anyflow-far": "no forward of its denoiser is seen",
    **dict.fromkeys(("ltx-video-upscaler", "ltx-2-upscaler"), "no job of it has two steps"),
}
"""Families whose jobs have no checkpoints and begin anew, and how the reason begins."""


@pytest.mark.parity_more
@pytest.mark.parametrize("family", [pytest.param(one, id=one.tiny) for one in GRID])
def test_a_job_continues_bit_for_bit_in_another_process(
    family: Family,
    models_folder: Path,
    process: ProcessPoolExecutor,
    keep_more_continued: Callable[[str, object], None],
) -> None:
    if family.needs_torchvision and (fault := torchvision_fault()):
        pytest.skip(fault)
    difference = resumed_difference(family, models_folder / family.tiny, process)
    keep_more_continued(family.tiny, difference)
    if family.tiny in RESTARTS:
        assert str(difference).startswith(RESTARTS[family.tiny])
    else:
        assert difference == 0.0
