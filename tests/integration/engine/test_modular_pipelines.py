"""Folders of modular pipelines that lack a part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec

from shared.tasks import Task

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("quick_loads")]


@pytest.mark.parametrize(
    ("model", "part"), [("modular-ideogram-4", "unconditional_transformer"), ("anima", "text_conditioner")]
)
def test_a_part_that_is_not_in_the_folder_is_named(
    tiny_model: Callable[[str], Path], tmp_path: Path, model: str, part: str
) -> None:
    folder = tmp_path / model
    shutil.copytree(tiny_model(model), folder)
    shutil.rmtree(folder / part)
    recorder = EngineHarness(a_spec(folder, tasks=(Task.TEXT_TO_IMAGE,))).run(a_job("job"))
    error = recorder.finished["job"].error
    assert error is not None
    assert part in error.message


def test_a_part_that_rewrites_prompts_can_be_missing(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The index of a repository names it as a part that comes from another one."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("modular-ideogram-4"), folder)
    file = folder / "modular_model_index.json"
    index = json.loads(file.read_text())
    index["prompt_enhancer_head"][2]["pretrained_model_name_or_path"] = "someone/enhancer"
    file.write_text(json.dumps(index))
    recorder = EngineHarness(a_spec(folder, tasks=(Task.TEXT_TO_IMAGE,))).run(a_job("job", steps=2))
    assert recorder.finished["job"].error is None
    assert recorder.images["job", 0].shape[:2] == (64, 64)
