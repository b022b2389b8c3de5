"""Folders of modular pipelines that lack a part."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec

from shared.job_fields import Task

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]


@pytest.mark.parametrize(("model", "part"), [("anima", "text_conditioner")])
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
