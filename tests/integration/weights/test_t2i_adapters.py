"""T2I-Adapters in running batches: each row has its own image and scale, or none."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, MultiAdapter, T2IAdapter
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec
from parity.plain_calls import arguments
from parity.running import ALIKE, TOLERANCE, as_floats
from tiny import controls

from shared.config.controls import Control, ControlSpec
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.errors import ModelUnavailable
from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines.loading import load

pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.filterwarnings("ignore:The decode_latents method is deprecated:FutureWarning"),  # the pipeline's own
]

LOADER: Any = DiffusionPipeline


def adapter_spec(source: Path, folder: Path) -> ModelSpec:
    """Return a model with an adapter that reads colours, and one that reads greys."""
    nets = tuple(
        ControlSpec(id=name, source=str(controls.save_t2i_adapter(source, folder / name, seed, in_channels=channels)))
        for seed, (name, channels) in enumerate((("pose", 3), ("canny", 1)))
    )
    limits = Limits(multiple_of=16, max_controls=2)
    return a_spec(source, control=nets, tasks=(Task.TEXT_TO_IMAGE,), limits=limits)


@cache
def plain_pipeline(source: Path, adapters: tuple[str, ...]) -> Any:
    pipeline = LOADER.from_pretrained(source, local_files_only=True)
    if adapters:
        loaded: Any = [T2IAdapter.from_pretrained(one) for one in adapters]
        controlled = getattr(diffusers, type(pipeline).__name__.replace("Pipeline", "AdapterPipeline"))
        pipeline = controlled.from_pipe(pipeline, adapter=MultiAdapter(loaded) if len(loaded) > 1 else loaded[0])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def plain_image(spec: ModelSpec, job: Job) -> np.ndarray:
    sources = {control.id: control.source for control in spec.control}
    pipeline = plain_pipeline(Path(spec.source), tuple(sources[control.id] for control in job.controls))
    call = arguments(pipeline, job, 0)
    if [control.id for control in job.controls] == ["canny"]:
        call["image"] = call["image"].convert("L")
    elif len(job.controls) > 1:
        call["image"] = [call["image"][0], call["image"][1].convert("L")]
    with torch.no_grad():
        made = pipeline(**{**call, "output_type": "np"})
    return np.moveaxis(np.asarray(made.images[0]), -1, 0)


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_rows_with_different_adapters_and_scales_and_without_share_forwards(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """They equal the unmodified pipeline; adapters of XL can end after a share of the steps."""
    spec, end = adapter_spec(tiny_model(family), tmp_path), 0.5 if family == "sdxl" else 1.0
    pose, canny = Control(id="pose", scale=0.9), Control(id="canny", scale=0.6, end=end)
    jobs = [
        a_job("pose", controls=(pose,)),
        a_job("pose-weakly", controls=(Control(id="pose", scale=0.2),), guidance_scale=1.0),
        a_job("canny", controls=(canny,), guidance_scale=6.0, steps=5),
        a_job("both", controls=(pose, Control(id="canny", scale=0.4))),
        a_job("none"),
    ]
    without = jobs[0].model_copy(update={"id": "without", "controls": (), "control_images": ()})
    with as_floats():
        recorder = EngineHarness(spec).run(*jobs)
        assert not {name: ended.error.message for name, ended in recorder.finished.items() if ended.error}
        assert recorder.rows == [5, 5, 5, 5, 1]
        for job in jobs:
            assert np.abs(recorder.images[job.id, 0] - plain_image(spec, job)).max() <= TOLERANCE, job.id
        assert np.abs(plain_image(spec, without) - recorder.images["pose", 0]).max() > ALIKE


@pytest.mark.parametrize(("family", "steps"), [("sd", {"end": 0.5}), ("sd", {"start": 0.5}), ("sdxl", {"start": 0.5})])
def test_steps_that_an_adapter_cannot_leave_out_are_refused(
    family: str, steps: dict[str, float], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    job = a_job("one", controls=(Control(id="pose", **steps),))
    error = EngineHarness(adapter_spec(tiny_model(family), tmp_path)).run(job).finished["one"].error
    assert error is not None
    assert error.param == f"controls.0.{next(iter(steps))}"


def test_a_model_has_nets_of_one_class_made_for_its_denoiser(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    source, device = tiny_model("sd"), torch.device("cpu")
    spec = adapter_spec(source, tmp_path)
    net = ControlSpec(id="edges", source=str(controls.save(source, tmp_path / "edges", 1)))
    with pytest.raises(ModelUnavailable, match="its controls are a ControlNetModel and a T2IAdapter; a model has"):
        load(spec.model_copy(update={"control": (*spec.control, net)}), source, device)
    T2IAdapter(3, [16, 32, 32, 32], 1, 8).save_pretrained(tmp_path / "other")
    other = ControlSpec(id="other", source=str(tmp_path / "other"))
    with pytest.raises(ModelUnavailable, match="control 'other': its adapter_type is full_adapter: made for another"):
        load(spec.model_copy(update={"control": (other,)}), source, device)
