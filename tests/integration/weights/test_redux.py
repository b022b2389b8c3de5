"""FLUX.1 Redux in running batches: prompts with an image behind them, an image alone, and prompts without."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FluxControlNetModel, FluxPriorReduxPipeline
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec, input_files
from parity.plain_calls import arguments, pipeline_of
from parity.running import ALIKE, TOLERANCE, as_floats
from PIL import Image, ImageOps
from safetensors.torch import load_file
from tiny import controls, tokens

from shared.config.controls import Control, ControlSpec
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.errors import ModelUnavailable
from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines.control_nets import control_pipeline_class
from worker.engine.pipelines.loading import load, locate

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)

LOADER: Any = DiffusionPipeline
TASKS = (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT)


def like(scale: float = 1.0) -> tuple[Control, ...]:
    return (Control(id="like", kind="redux", scale=scale),)


def redux_spec(source: Path, redux: Path) -> ModelSpec:
    control = ControlSpec(id="like", kind="redux", source=str(redux))
    return a_spec(source, tasks=TASKS, limits=Limits(multiple_of=16), control=(control,))


def plain_image(source: Path, redux: Path, job: Job, net: Path | None = None) -> np.ndarray:
    """Return what a user of diffusers makes: the prior's output in place of the prompt, and maybe a control net."""
    loaded = LOADER.from_pretrained(source, local_files_only=True)
    pipeline: Any = pipeline_of(loaded, job.task)
    nets = tuple(control for control in job.controls if control.kind == "controlnet")
    if nets:
        controlled: Any = control_pipeline_class(pipeline, loaded_net := FluxControlNetModel.from_pretrained(net))
        pipeline = controlled.from_pipe(pipeline, controlnet=loaded_net)
    opened = [Image.open(io.BytesIO(data)).convert("RGB") for data in input_files(job).controls]
    images = {control.kind: image for control, image in zip(job.controls, opened, strict=True)}
    call = arguments(pipeline, job.model_copy(update={"controls": nets, "control_images": nets and ("",)}), 0)
    if nets:
        call["control_image"] = ImageOps.fit(images["controlnet"], (job.width, job.height), Image.Resampling.LANCZOS)
    texts = {name: getattr(loaded, name) for name in ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")}
    prior = FluxPriorReduxPipeline.from_pretrained(redux, **texts)
    for one in (pipeline, prior):
        one.set_progress_bar_config(disable=True)
    with torch.no_grad():
        if "redux" in images:
            scale = next(control.scale for control in job.controls if control.kind == "redux")
            prompt = call.pop("prompt")
            zeros = {
                "prompt_embeds": torch.zeros(1, 512, tokens.WIDTH),
                "pooled_prompt_embeds": torch.zeros(1, tokens.WIDTH),
            }
            text = {"prompt": prompt} if prompt else zeros
            call |= prior(images["redux"], **text, prompt_embeds_scale=scale)
        return np.asarray(pipeline(**{**call, "output_type": "pt"}).images[0].numpy())


def test_prompts_with_an_image_and_images_alone_share_forwards(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Jobs without an image run beside them; all equal the unmodified pipelines."""
    source, redux = tiny_model("flux"), controls.save_redux(tmp_path / "redux", 1)
    begun = {"strength": 0.7, "controls": like()}
    jobs = [
        a_job("both", controls=like()),
        a_job("weakly", prompt="a boat", controls=like(0.4), guidance_scale=2.0, steps=5),
        a_job("image", prompt="", controls=like()),
        a_job("other", prompt="", controls=like(1.5), seed=3),
        a_job("changed", **begun),
        a_job("repainted", task=Task.INPAINT, **begun),
        a_job("none"),
        a_job("neither", prompt="a mill"),
    ]
    without = jobs[0].model_copy(update={"id": "without", "controls": (), "control_images": ()})
    spec = redux_spec(source, redux)
    with as_floats():
        recorder = EngineHarness(spec).run(*jobs)
        assert not {name: ended.error.message for name, ended in recorder.finished.items() if ended.error}
        assert max(recorder.rows) == 6
        for job in jobs:
            off = np.abs(recorder.images[job.id, 0] - plain_image(source, redux, job)).max()
            assert off <= TOLERANCE, job.id
        assert np.abs(plain_image(source, redux, without) - recorder.images["both", 0]).max() > ALIKE


def test_fill_repaints_by_an_image_with_and_without_a_prompt(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    source, redux = tiny_model("flux-fill"), controls.save_redux(tmp_path / "redux", 1)
    fill = {"task": Task.INPAINT, "strength": 1.0}
    jobs = [
        a_job("both", controls=like(), **fill),
        a_job("image", prompt="", controls=like(0.5), **fill),
        a_job("none", **fill),
    ]
    spec = redux_spec(source, redux).model_copy(update={"tasks": (Task.INPAINT,)})
    with as_floats():
        recorder = EngineHarness(spec).run(*jobs)
        assert not {name: ended.error.message for name, ended in recorder.finished.items() if ended.error}
        assert max(recorder.rows) == 2
        for job in jobs:
            off = np.abs(recorder.images[job.id, 0] - plain_image(source, redux, job)).max()
            assert off <= TOLERANCE, job.id


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # of diffusers' own control net
def test_a_job_follows_an_image_and_a_control_net(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    source, redux = tiny_model("flux"), controls.save_redux(tmp_path / "redux", 1)
    net = controls.save(source, tmp_path / "net", 2)
    both = (*like(0.8), Control(id="edges", scale=0.7))
    jobs = [
        a_job("both", controls=both),
        a_job("reversed", controls=both[::-1], steps=5),
        a_job("image", prompt="", controls=both),
        a_job("changed", strength=0.7, controls=both),
        a_job("repainted", task=Task.INPAINT, strength=0.7, controls=both),
        a_job("redux only", controls=both[:1]),
        a_job("net only", controls=both[1:]),
    ]
    spec = redux_spec(source, redux)
    nets = (*spec.control, ControlSpec(id="edges", source=str(net)))
    limits = spec.limits.model_copy(update={"max_controls": 2})
    with as_floats():
        recorder = EngineHarness(spec.model_copy(update={"control": nets, "limits": limits})).run(*jobs)
        assert not {name: ended.error.message for name, ended in recorder.finished.items() if ended.error}
        assert max(recorder.rows) == 5
        for job in jobs:
            off = np.abs(recorder.images[job.id, 0] - plain_image(source, redux, job, net)).max()
            assert off <= TOLERANCE, job.id


def test_its_weights_count_as_memory_of_the_model(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    source, redux = tiny_model("flux"), controls.save_redux(tmp_path / "redux", 1)
    whole, plain = redux_spec(source, redux), a_spec(source)
    weights = sum(_bytes_in(file) for file in redux.glob("*/*.safetensors"))
    assert locate(whole)[1] - locate(plain)[1] == weights
    device = torch.device("cpu")
    loaded = load(whole, source, device).nbytes - load(plain, source, device).nbytes
    assert loaded == pytest.approx(weights, rel=0.05)


def _bytes_in(file: Path) -> int:
    return sum(tensor.nbytes for tensor in load_file(file).values())


@pytest.mark.parametrize(
    ("family", "folder", "fault"),
    [
        ("sd", "redux", "control 'like': Redux is for FLUX.1, from text"),
        ("flux", "wide", "control 'like': its embeddings have 48 values, and the model needs 32"),
        ("flux", "nowhere", "control 'like': no FluxPriorReduxPipeline at .*nowhere"),
    ],
)
def test_one_that_does_not_fit_fails_the_load(
    family: str, folder: str, fault: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    controls.save_redux(tmp_path / "redux", 1)
    controls.save_redux(tmp_path / "wide", 1, width=48)
    source = tiny_model(family)
    with pytest.raises(ModelUnavailable, match=fault):
        load(redux_spec(source, tmp_path / folder), source, torch.device("cpu"))
