"""What a loaded model knows of itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from worker.engine.pipelines.model_facts import facts_of


def pipeline(step: int, scheduler: Any = None) -> Any:
    return SimpleNamespace(image_processor=SimpleNamespace(config={"vae_scale_factor": step}), scheduler=scheduler)


def test_the_step_of_sides_is_that_of_the_files_or_else_of_all_pipelines(tmp_path: Path) -> None:
    """The VAE of a modular pipeline can be in another repository."""
    assert facts_of(tmp_path, [pipeline(16), pipeline(24)], {}).size_step == 48
    assert facts_of(tmp_path, [SimpleNamespace()], {}).size_step == 1
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/config.json").write_text(json.dumps({"block_out_channels": [8, 16, 32, 64]}))
    assert facts_of(tmp_path, [pipeline(16)], {}).size_step == 8


def test_the_scheduler_is_that_of_the_first_pipeline_with_one(tmp_path: Path) -> None:
    without = facts_of(tmp_path, [pipeline(8)], {"lms": "it needs scipy"})
    assert (without.own_scheduler.class_name, without.unusable_schedulers) == (None, {"lms": "it needs scipy"})
    noise = facts_of(tmp_path, [pipeline(8), pipeline(8, DDIMScheduler())], {}).own_scheduler
    assert (noise[:3], noise.train_steps) == (("DDIMScheduler", False, False), 1000)
    flow = facts_of(tmp_path, [pipeline(8, FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True))], {})
    assert flow.own_scheduler[:3] == ("FlowMatchEulerDiscreteScheduler", True, True)
