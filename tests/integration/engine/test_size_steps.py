"""Sides that a pipeline would round are refused where the model's folder says so, and have a warning elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import families
import pytest
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec
from tiny.registry import torchvision_fault

from shared.config.models_file import load
from shared.config.request_limits import Defaults, Limits
from shared.job import InputRef
from shared.tasks import Task
from worker.engine.protocol import ModelLoaded

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models", "quick_loads")]


IMAGE = InputRef(id="in_1", key="k", content_type="image/png", bytes=1, width=74, height=110)
CLASSIC = ("sd", "sdxl", "sd3", "flux", "qwen-image", "z-image", "bria", "krea-2")
NEW = {
    row.tiny: row.around
    for module in families.modules()
    for row in module.ROWS
    if Task.TEXT_TO_IMAGE in row.tasks and not row.needs_torchvision
}
MODULAR = ("modular-ernie-image", "modular-ideogram-4")


@pytest.mark.parametrize("model", [*CLASSIC, *NEW, *MODULAR])
def test_the_limit_of_a_folder_is_what_its_pipeline_makes(
    tiny_model: Callable[[str], Path], tmp_path: Path, model: str
) -> None:
    """A side between two of them is rounded: a job that was accepted all the same has a warning."""
    folder, file = tiny_model(model), tmp_path / "models.toml"
    file.write_text(f'[[model]]\nid = "m"\nsource = "{folder}"\n[model.limits]\nmultiple_of = 1\n')
    step = load(file).get("m").limits.multiple_of
    side = 4 * step
    jobs = [a_job("fits", width=side, height=side), a_job("wide", width=side + step // 2, height=side)]
    with NEW.get(model, nullcontext)():
        recorder = EngineHarness(a_spec(folder, tasks=(Task.TEXT_TO_IMAGE,))).run(*jobs)
    assert recorder.finished["fits"].error is None
    assert recorder.images["fits", 0].shape[:2] == (side, side)
    assert not recorder.finished["fits"].warnings
    assert [event.facts.size_step for event in recorder.model_events if isinstance(event, ModelLoaded)] == [step]
    wide = recorder.finished["wide"]
    if wide.error is None:  # some pipelines refuse it themselves
        assert recorder.images["wide", 0].shape[:2] in ((side, side), (side, side + step))  # Krea 2 rounds up
        assert [(one.param, f"multiples of {step}, not" in one.message) for one in wide.warnings] == [("width", True)]


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({"width": 72, "height": 72}, ["width", "height"]),
        ({"width": 88, "height": 72}, ["height"]),
        ({"width": 72, "height": 72, "task": Task.IMAGE_TO_IMAGE, "strength": 0.5}, ["width", "height"]),
        ({"width": 72, "height": 104, "images": (IMAGE,), "task": Task.IMAGE_TO_IMAGE, "strength": 0.5}, []),
    ],
)
def test_only_sides_that_a_request_chose_have_a_warning(
    fields: dict[str, Any], warned: list[str], tiny_model: Callable[[str], Path]
) -> None:
    """Not defaults, nor those of the image to start from; the result has the size that is made all the same."""
    limits, defaults = Limits(multiple_of=8), Defaults(width=88, height=64)
    spec = a_spec(tiny_model("flux"), limits=limits, defaults=defaults)
    recorder = EngineHarness(spec).run(a_job("one", steps=2, **fields))
    assert recorder.finished["one"].error is None
    assert [one.param for one in recorder.finished["one"].warnings] == warned


@pytest.mark.vision
def test_qwen_image_2_1_makes_multiples_of_32(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    if fault := torchvision_fault():
        pytest.skip(fault)
    folder, file = tiny_model("modular-qwen-image-2.1"), tmp_path / "models.toml"
    file.write_text(f'[[model]]\nid = "m"\nsource = "{folder}"\n[model.limits]\nmultiple_of = 1\n')
    assert load(file).get("m").limits.multiple_of == 32
    jobs = [a_job("fits", width=96, height=64), a_job("rounded", width=112, height=64)]
    recorder = EngineHarness(a_spec(folder, tasks=(Task.TEXT_TO_IMAGE,))).run(*jobs)
    assert [recorder.images[job.id, 0].shape[:2] for job in jobs] == [(64, 96), (64, 96)]
