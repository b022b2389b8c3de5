"""LoRA adapters that differ from video to video in one fused forward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from adapter_room import Bare, assert_all_as_alone, bare, eight_jobs, run_together, spec_with
from parity.running import as_floats
from tiny import lora, shelf

from shared.catalog import Defaults, Limits
from shared.job import Task

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")

FRAMES = 5


@pytest.mark.parametrize(
    ("model", "components"), [("wan-2.1-t2v", {}), ("wan-2.2-t2v", {"oil": "transformer_2", "neon": "transformer_2"})]
)
def test_videos_with_different_adapters_and_none_share_one_forward(
    model: str, components: dict[str, str], tmp_path: Path
) -> None:
    """Eight jobs, three adapters in six mixtures; where there are two denoisers, each has its own."""
    folder = shelf.put(model, tmp_path / model)
    pipeline = bare(folder)
    files = {
        name: lora.save(pipeline, tmp_path / f"{name}.safetensors", at, wanted=wanted)
        for at, (name, wanted) in enumerate(
            {"ink": lora.everywhere, "oil": lora.everywhere, "neon": lora.attention}.items()
        )
    }
    jobs = eight_jobs(task=Task.TEXT_TO_VIDEO, frames=FRAMES, fps=24)
    spec = spec_with(
        folder,
        files,
        components,
        tasks=(Task.TEXT_TO_VIDEO,),
        limits=Limits(multiple_of=16, max_frames=FRAMES, frames_multiple=4),
        defaults=Defaults(frames=FRAMES),
    )
    lone = Bare(folder, files, components)
    with as_floats():
        heard = run_together(spec, *jobs)
    assert_all_as_alone(heard, lone, jobs)
    assert heard.rows[0] == 8
    assert {heard.ended[job.id].fusing.max_jobs for job in jobs} == {8}
    for job in jobs:
        plain = lone.picture(job.model_copy(update={"adapters": ()}))
        changed = np.abs(heard.pictures[job.id, 0] - plain).max()
        assert (changed > 1e-2) == bool(job.adapters), f"{job.id}: {changed}"
