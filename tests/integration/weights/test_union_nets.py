"""Unions of control nets in running batches: one net for images of several kinds, which a control's `mode` names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec
from parity.plain_calls import arguments, pipeline_of
from parity.running import ALIKE, TOLERANCE, as_floats
from tiny import controls

from shared.config.controls import Control, ControlSpec
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.errors import ModelUnavailable
from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines.loading import load, locate

pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),  # diffusers' own net uses it
]

LOADER: Any = DiffusionPipeline
MODES = {"pose": 0, "edges": 3}
TASKS = (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT)


def union_spec(source: Path, net: Path) -> ModelSpec:
    nets = tuple(ControlSpec(id=name, source=str(net), mode=mode) for name, mode in MODES.items())
    return a_spec(source, control=nets, tasks=TASKS, limits=Limits(multiple_of=16, max_controls=2))


@cache
def plain_pipeline(source: Path, net: Path, task: Task, count: int) -> Any:
    """Return diffusers' pipeline of a task with as many unions."""
    pipeline = pipeline_of(LOADER.from_pretrained(source, local_files_only=True), task)
    if count:
        is_xl = "XL" in type(pipeline).__name__
        net_class: Any = diffusers.ControlNetUnionModel if is_xl else diffusers.FluxControlNetModel
        nets = [net_class.from_pretrained(net) for _ in range(count)]
        name = type(pipeline).__name__
        of_task = next((one for one in ("Img2Img", "Inpaint") if one in name), "")
        family = "StableDiffusionXLControlNetUnion" if is_xl else "FluxControlNet"
        controlled: Any = getattr(diffusers, f"{family}{of_task}Pipeline")
        pipeline = controlled.from_pipe(pipeline, controlnet=nets if count > 1 else nets[0])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def plain_image(source: Path, net: Path, job: Job) -> np.ndarray:
    pipeline = plain_pipeline(source, net, job.task, len(job.controls))
    call = arguments(pipeline, job, 0)
    if job.controls:
        modes = [MODES[control.id] for control in job.controls]
        call["control_mode"] = modes if len(modes) > 1 else modes[0]
    torch.manual_seed(job.seed)
    with torch.no_grad():
        return np.moveaxis(np.asarray(pipeline(**{**call, "output_type": "np"}).images[0]), -1, 0)


@pytest.mark.parametrize("family", ["sdxl", "flux"])
def test_rows_of_all_modes_equal_the_unmodified_pipelines(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """With Stable Diffusion XL all share the forwards of the denoiser, with and without control."""
    source = tiny_model(family)
    net = controls.save_union(source, tmp_path / "union", 1)
    pose, edges = Control(id="pose", scale=0.9), Control(id="edges", scale=0.6, end=0.5)
    jobs = [
        a_job("pose", controls=(pose,)),
        a_job("pose-weakly", controls=(Control(id="pose", scale=0.3),), guidance_scale=2.0),
        a_job("edges", controls=(edges,)),
        a_job("both", controls=(pose, edges)),
        a_job("changed", controls=(pose,), strength=0.7),
        a_job("repainted", controls=(edges,), strength=0.7, task=Task.INPAINT),
        a_job("none"),
    ]
    same_image = {"seed": jobs[0].seed, "prompt": jobs[0].prompt}
    jobs.append(a_job("other-mode", controls=(Control(id="edges", scale=0.9),), **same_image))
    with as_floats():
        recorder = EngineHarness(union_spec(source, net)).run(*jobs)
        assert not {name: ended.error.message for name, ended in recorder.finished.items() if ended.error}
        for job in jobs:
            assert np.abs(recorder.images[job.id, 0] - plain_image(source, net, job)).max() <= TOLERANCE, job.id
        assert np.abs(recorder.images["pose", 0] - recorder.images["other-mode", 0]).max() > ALIKE
    if family == "sdxl":
        assert recorder.rows[0] == len(jobs)


def test_a_net_of_several_controls_is_in_memory_once(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_model("sdxl")
    both = union_spec(source, controls.save_union(source, tmp_path / "union", 1))
    one = both.model_copy(update={"control": both.control[:1]})
    device = torch.device("cpu")
    assert locate(both)[1] == locate(one)[1]
    assert load(both, source, device).nbytes == load(one, source, device).nbytes


@pytest.mark.parametrize(
    ("saved", "mode", "fault"),
    [
        (controls.save_union, None, "control 'a': it is a union, and needs a mode of 0 to 3"),
        (controls.save_union, 4, "control 'a': it is a union, and needs a mode of 0 to 3"),
        (controls.save, 0, "control 'a': it is no union; remove its mode"),
    ],
)
def test_only_a_union_has_one_of_its_modes(
    saved: Callable[..., Path], mode: int | None, fault: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tiny_model("sdxl")
    net = saved(source, tmp_path / "net", 1)
    spec = a_spec(source, control=(ControlSpec(id="a", source=str(net), mode=mode),), tasks=(Task.TEXT_TO_IMAGE,))
    with pytest.raises(ModelUnavailable, match=fault):
        load(spec, source, torch.device("cpu"))
