"""Jobs continue from their checkpoints in another engine, with the image that they would have had."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import diffusers
import numpy as np
import pytest
from harness.adapters import adapters_of, load_pipeline, spec_with
from harness.checkpoints import halfway, resumed, run_with_checkpoints
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec
from tiny import controls, lora

from shared.config.controls import Control, ControlSpec
from shared.config.scheduler_choices import SchedulerOptions
from shared.tasks import Task
from worker.engine.remote import RemoteEngine

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

SCHEDULERS = (
    *("EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "UniPCMultistepScheduler", "LCMScheduler"),
    *("DPMSolverMultistepScheduler", "DDPMScheduler", "HeunDiscreteScheduler", "PNDMScheduler", "TCDScheduler"),
    *("KDPM2AncestralDiscreteScheduler", "DEISMultistepScheduler", "SASolverScheduler", "IPNDMScheduler"),
    *("DPMSolverSinglestepScheduler", "EDMEulerScheduler"),
)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_image_continues_with_any_noise_scheduler(scheduler: str, tiny_models: Path) -> None:
    """What a scheduler keeps of earlier steps, and the generators from which it draws, are in the checkpoint."""
    spec = a_spec(tiny_models / "sd", schedulers=SCHEDULERS)
    outcome = resumed(spec, a_job("one", steps=8, scheduler=scheduler))
    assert outcome.difference == 0.0
    assert outcome.resumed.finished["one"].resumed_steps >= 4
    whole, rest = outcome.steps_computed
    assert 0 < rest <= whole - 4


@pytest.mark.parametrize(
    ("family", "scheduler", "options"),
    [
        ("sd", "DPMSolverMultistepScheduler", SchedulerOptions(sde=True, karras=True)),
        ("flux", "UniPCMultistepScheduler", SchedulerOptions(shift=3.0)),
        ("sd3", "FlowMatchHeunDiscreteScheduler", None),
        ("flux", "FlowMatchLCMScheduler", None),
    ],
)
def test_an_image_continues_with_noise_of_its_own_at_each_step_and_along_a_flow(
    family: str, scheduler: str, options: SchedulerOptions | None, tiny_model: Callable[[str], Path]
) -> None:
    spec = a_spec(tiny_model(family), schedulers=(scheduler,), tasks=(Task.TEXT_TO_IMAGE,))
    outcome = resumed(spec, a_job("one", steps=8, scheduler=scheduler, scheduler_options=options))
    assert outcome.difference == 0.0
    assert outcome.resumed.finished["one"].resumed_steps >= 4


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_an_image_continues_with_guidance_by_two_calls(
    guidance_scale: float, tiny_model: Callable[[str], Path]
) -> None:
    spec = a_spec(tiny_model("qwen-image"), tasks=(Task.TEXT_TO_IMAGE,))
    outcome = resumed(spec, a_job("one", steps=6, guidance_scale=guidance_scale))
    assert outcome.difference == 0.0
    assert outcome.steps_computed == ((12, 6) if guidance_scale > 1 else (6, 3))


def test_the_images_of_a_job_continue_each_with_its_seed(tiny_models: Path) -> None:
    outcome = resumed(a_spec(tiny_models / "sd"), a_job("three", n=3, steps=6))
    assert outcome.difference == 0.0
    assert [image and image.step for image in outcome.checkpoint.images] == [3, 3, 3]
    assert outcome.resumed.finished["three"].resumed_steps == 9
    assert outcome.resumed.rows == [3, 3, 3]


def test_a_job_continues_in_another_process(tiny_models: Path) -> None:
    outcome = resumed(a_spec(tiny_models / "sd"), a_job("one", steps=6), RemoteEngine)
    assert outcome.difference == 0.0
    assert outcome.steps_computed == (6, 3)


def test_a_job_that_continues_joins_a_running_batch_and_counts_on(tiny_models: Path) -> None:
    spec = a_spec(tiny_models / "sd")
    job = a_job("one", steps=6)
    whole = run_with_checkpoints(spec, job)
    file = halfway(whole).images[0]
    assert file is not None
    harness = EngineHarness(spec)
    harness.submit(a_job("mate", steps=4))
    harness.submit(job, checkpoints=(file.data,))
    with harness.started():
        harness.recorder.wait_for(["one", "mate"])
    assert max(harness.recorder.rows) == 2
    assert [entry[2:] for entry in harness.recorder.log if entry[:2] == ("progress", "one")][:2] == [(3, 6), (4, 6)]
    assert np.abs(harness.recorder.images["one", 0].astype(float) - whole.images["one", 0]).max() <= 1


def test_an_inpainted_image_continues_and_keeps_what_is_not_masked(tiny_models: Path) -> None:
    spec = a_spec(tiny_models / "sd", tasks=(Task.TEXT_TO_IMAGE, Task.INPAINT))
    job = a_job("one", task=Task.INPAINT, strength=0.9, steps=8, keep_unmasked=True, mask_blur=4)
    outcome = resumed(spec, job)
    assert outcome.difference == 0.0
    assert outcome.resumed.finished["one"].resumed_steps >= 3


def test_an_image_continues_with_its_adapter(tiny_models: Path, tmp_path: Path) -> None:
    folder = tiny_models / "sd"
    file = lora.save(load_pipeline(folder), tmp_path / "ink.safetensors", 1, components=("unet", "text_encoder"))
    job = a_job("one", steps=6, adapters=adapters_of(("ink", 1.0)))
    outcome = resumed(spec_with(folder, {"ink": file}), job)
    assert outcome.difference == 0.0
    plain = EngineHarness(a_spec(folder)).run(a_job("one", steps=6))
    assert not np.array_equal(outcome.resumed.images["one", 0], plain.images["one", 0]), "it changes the image"


@pytest.mark.parametrize("family", ["sd", "sd3"])
def test_an_image_continues_with_its_control_net(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_model(family)
    net = controls.save(folder, tmp_path / "net", 1)
    spec = a_spec(folder, control=(ControlSpec(id="net", source=str(net)),), tasks=(Task.TEXT_TO_IMAGE,))
    job = a_job("one", steps=6, controls=(Control(id="net", scale=0.7, end=0.8),))
    outcome = resumed(spec, job)
    assert outcome.difference == 0.0
    assert outcome.steps_computed == (6, 3)


def test_an_image_continues_with_its_ip_adapter(tiny_models: Path, tmp_path: Path) -> None:
    folder = tiny_models / "sd"
    source = controls.save_ip_adapter(folder, tmp_path / "style", 1)
    style = ControlSpec(id="style", kind="ip_adapter", source=str(source), weight_name="ip-adapter.safetensors")
    job = a_job("one", steps=6, controls=(Control(id="style", kind="ip_adapter", scale=0.7),))
    outcome = resumed(a_spec(folder, control=(style,), tasks=(Task.TEXT_TO_IMAGE,)), job)
    assert outcome.difference == 0.0


def test_a_guider_with_momentum_has_no_checkpoints(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """It keeps an average of the outputs that a replay does not compute: the check before the first one finds it."""
    folder = tmp_path / "changed"
    shutil.copytree(tiny_model("modular-sdxl"), folder)
    guider = diffusers.AdaptiveProjectedGuidance(adaptive_projected_guidance_momentum=-0.5)
    guider.save_pretrained(str(folder / "guider"))
    index = json.loads((folder / "modular_model_index.json").read_text())
    source = {"pretrained_model_name_or_path": str(folder), "subfolder": "guider"}
    name = type(guider).__name__
    index["guider"] = ["diffusers", name, {"type_hint": ["diffusers", name], **source}]
    (folder / "modular_model_index.json").write_text(json.dumps(index))
    recorder = run_with_checkpoints(a_spec(folder, tasks=(Task.TEXT_TO_IMAGE,)), a_job("one", steps=6))
    assert recorder.finished["one"].error is None
    assert not any(image for event in recorder.checkpoints for image in event.images)
    assert re.match(r"an image that continued was off by \d+ of 255 levels", recorder.checkpoints[-1].reason or "")
