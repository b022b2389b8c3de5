"""IP-Adapters in running batches: each row has its own image and scale, or none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec, input_files
from parity.running import ALIKE, TOLERANCE, as_floats
from tiny import controls
from transformers import CLIPImageProcessorPil

from shared.config.controls import Control, ControlSpec
from shared.config.request_limits import Limits
from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines.call_arguments import arguments_for
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.pipelines.loading import locate

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)

FILE = "ip-adapter.safetensors"
LOADER: Any = DiffusionPipeline


def style(scale: float) -> tuple[Control, ...]:
    return (Control(id="style", kind="ip_adapter", scale=scale),)


@cache
def plain_pipeline(source: Path, adapter: Path | None) -> Any:
    pipeline = LOADER.from_pretrained(source, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    if adapter is not None:
        pipeline.register_modules(feature_extractor=CLIPImageProcessorPil(size=30, crop_size=30))
        pipeline.load_ip_adapter(str(adapter), subfolder="", weight_name=FILE, image_encoder_folder="image_encoder")
    return pipeline


def plain_image(source: Path, adapter: Path, job: Job) -> np.ndarray:
    pipeline = plain_pipeline(source, adapter if job.controls else None)
    if job.controls:
        pipeline.set_ip_adapter_scale(job.controls[0].scale)
    arguments = arguments_for(pipeline, job, 0, decode_inputs(job, input_files(job)))
    with torch.no_grad():
        return np.asarray(pipeline(**arguments).images[0].float().cpu().numpy())


@pytest.mark.parametrize("family", ["sd", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_rows_with_different_images_and_scales_and_without_share_forwards(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """They equal their solo runs and the unmodified pipeline; a job without control that of the model itself."""
    source = tiny_model(family)
    adapter = controls.save_ip_adapter(source, tmp_path / "style", 1)
    spec = a_spec(
        source,
        tasks=(Task.TEXT_TO_IMAGE,),
        limits=Limits(multiple_of=16),
        control=(ControlSpec(id="style", kind="ip_adapter", source=str(adapter), weight_name=FILE),),
    )
    jobs = [a_job(f"job{at}", controls=style(0.4 + 0.3 * at), guidance_scale=1.0 + at) for at in range(4)]
    jobs.append(a_job("none"))
    without = jobs[3].model_copy(update={"id": "without", "controls": (), "control_images": ()})
    harness = EngineHarness(spec)
    with as_floats(), harness.started():
        harness.submit(*jobs)
        harness.recorder.wait_for([job.id for job in jobs])
        for job in jobs:
            harness.submit(job.model_copy(update={"id": f"{job.id}-solo"}))
            harness.recorder.wait_for([f"{job.id}-solo"])
    recorder = harness.recorder
    assert not {name: ended.error.message for name, ended in recorder.finished.items() if ended.error}
    assert recorder.rows[0] == 5
    for job in jobs:
        made = recorder.images[job.id, 0]
        assert np.abs(made - recorder.images[f"{job.id}-solo", 0]).max() <= TOLERANCE, job.id
        assert np.abs(made - plain_image(source, adapter, job)).max() <= TOLERANCE, job.id
    assert np.abs(plain_image(source, adapter, without) - recorder.images["job3", 0]).max() > ALIKE
    assert locate(spec)[1] > locate(a_spec(source))[1] + (adapter / FILE).stat().st_size / 2


def test_one_that_no_job_can_have_does_not_stop_the_self_check(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Edits take no controls."""
    source = tiny_model("pix2pix")
    adapter = controls.save_ip_adapter(source, tmp_path / "adapter", 1)
    control = ControlSpec(id="style", kind="ip_adapter", source=str(adapter), weight_name=FILE)
    recorder = EngineHarness(a_spec(source, tasks=(Task.EDIT,), control=(control,))).run(a_job("one", task=Task.EDIT))
    assert recorder.finished["one"].error is None
    logged = capsys.readouterr().out
    assert "model_loaded" in logged
    assert "self_check_incomplete" not in logged
