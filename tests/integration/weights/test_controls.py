"""Control images in running batches: each row has its own, whatever its batch mates have."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, DiffusionPipeline
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder, a_job, a_spec, input_files
from parity.more.families import small
from parity.running import ALIKE, TOLERANCE, as_floats
from tiny import controls

from shared.config.controls import Control, ControlSpec
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.errors import ModelUnavailable, UnusableInput
from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines.call_arguments import arguments_for
from worker.engine.pipelines.clones import StepCounter
from worker.engine.pipelines.control_nets import control_pipeline_class, own_tokens
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.pipelines.loading import load, locate
from worker.engine.pipelines.task_pipelines import pipeline_for

pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.filterwarnings(
        "ignore:`FluxPosEmbed` is deprecated:FutureWarning"
    ),  # diffusers' own control net uses it
    pytest.mark.usefixtures("shared_models"),
]

Models = Callable[[str], Path]
NETS = ("edges", "depth")
SMALL = ("sana", "hunyuan-dit")  # they make no small images otherwise
LOADER: Any = DiffusionPipeline


@pytest.fixture(scope="module")
def models(tiny_model: Models) -> Models:
    """Return, for a family, the folder of its tiny model with two control nets beside it."""

    @cache
    def folder(family: str) -> Path:
        source = tiny_model(family)
        for seed, name in enumerate(NETS):
            controls.save(source, Path(f"{source}-{name}"), seed)
        return source

    return folder


def controlled_spec(source: Path, *, max_controls: int = 1, **fields: Any) -> ModelSpec:
    nets = tuple(ControlSpec(id=name, source=f"{source}-{name}") for name in NETS)
    limits = Limits(multiple_of=16, max_controls=max_controls)
    return a_spec(source, **{"control": nets, "tasks": (Task.TEXT_TO_IMAGE,), "limits": limits, **fields})


def run(spec: ModelSpec, jobs: Sequence[Job]) -> EventRecorder:
    """Run jobs together."""
    recorder = EngineHarness(spec).run(*jobs)
    assert not {name: ended.error.message for name, ended in recorder.finished.items() if ended.error}
    return recorder


@cache
def loaded(source: Path) -> Any:
    return LOADER.from_pretrained(source, local_files_only=True)


@cache
def loaded_net(folder: Path) -> Any:
    net_class = getattr(diffusers, json.loads((folder / "config.json").read_text())["_class_name"])
    return net_class.from_pretrained(folder)


@cache
def plain_pipeline(source: Path, task: Task, names: tuple[str, ...]) -> Any:
    """Return the pipeline of a task with control nets, by diffusers only."""
    pipeline: Any = pipeline_for(task, loaded(source))
    if names:
        nets = [loaded_net(Path(f"{source}-{name}")) for name in names]
        controlled: Any = control_pipeline_class(pipeline, nets[0])
        pipeline = controlled.from_pipe(pipeline, controlnet=nets if len(nets) > 1 else nets[0])
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def plain_image(source: Path, job: Job) -> np.ndarray:
    pipeline = plain_pipeline(source, job.task, tuple(control.id for control in job.controls))
    arguments = arguments_for(pipeline, job, 0, decode_inputs(job, input_files(job)))
    torch.manual_seed(job.seed)
    with torch.no_grad():
        return np.asarray(pipeline(**arguments).images[0].float().cpu().numpy())


def compare(recorder: EventRecorder, source: Path, jobs: Sequence[Job]) -> None:
    """Compare each job with the unmodified pipeline, which runs it by itself."""
    for job in jobs:
        assert np.abs(recorder.images[job.id, 0] - plain_image(source, job)).max() <= TOLERANCE, job.id


@pytest.mark.parametrize(
    "family",
    [
        *("sd", "flux", "qwen-image", "sana", "hunyuan-dit", "z-image"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sdxl", "sd3")),
    ],
)
def test_five_control_images_share_a_forward(family: str, models: Models) -> None:
    """With different scales, prompts, guidance and numbers of steps."""
    source = models(family)
    jobs = [
        a_job(
            f"job{at}",
            controls=(Control(id="edges", scale=0.3 + 0.2 * at),),
            steps=2 + at % 2,
            guidance_scale=3.0 + at % 3,
            prompt="a cat" + " and another" * (at % 3),
        )
        for at in range(5)
    ]
    without = jobs[4].model_copy(update={"id": "without", "controls": (), "control_images": ()})
    with as_floats(), small(family, "small_images" if family in SMALL else "")():
        recorder = run(controlled_spec(source), jobs)
        compare(recorder, source, jobs)
        assert recorder.rows[:2] == [5, 5]
        assert np.abs(plain_image(source, without) - recorder.images["job4", 0]).max() > ALIKE


@pytest.fixture
def net_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each forward of a control net."""
    forward, rows = ControlNetModel.forward, list[int]()

    @wraps(forward)
    def counted(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(sample.shape[0])
        return forward(self, sample, *args, **kwargs)

    monkeypatch.setattr(ControlNetModel, "forward", counted)
    return rows


def test_rows_with_any_control_and_without_share_the_forwards_of_a_unet(models: Models, net_rows: list[int]) -> None:
    """Outside of its steps a control takes no forward of its net."""
    source = models("sd")
    jobs = [
        a_job("whole", controls=(Control(id="edges"),)),
        a_job("late", controls=(Control(id="edges", scale=0.7, start=0.5),)),
        a_job("early", controls=(Control(id="depth", end=0.5),)),
        a_job("both", controls=(Control(id="depth", scale=0.8), Control(id="edges", scale=0.4, end=0.5))),
        a_job("none"),
    ]
    with as_floats():
        harness = EngineHarness(controlled_spec(source, max_controls=2))
        with harness.started() as engine:
            engine.warm_up()
            net_rows.clear()
            harness.submit(*jobs)
            harness.recorder.wait_for([job.id for job in jobs])
        assert harness.recorder.rows == [5, 5, 5, 5]
        assert max(net_rows) > 2
        assert sum(net_rows) == 2 * (4 + 2 + 2 + 2 * 4)  # two of each step, by guidance: whole, late, early, both
        compare(harness.recorder, source, jobs)


@pytest.mark.parametrize("family", ["sd", pytest.param("sdxl", marks=pytest.mark.slow), "flux", "z-image"])
def test_images_to_change_and_to_repaint_have_controls(family: str, models: Models) -> None:
    source, tasks = models(family), (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT)
    if family == "z-image":  # diffusers has no pipeline that begins with an image, and none with a strength
        tasks = (Task.TEXT_TO_IMAGE, Task.INPAINT)
    jobs = [a_job(task.value, task=task, controls=(Control(id="edges"),), strength=0.7) for task in tasks]
    jobs[0] = jobs[0].model_copy(update={"strength": None, "task": Task.TEXT_TO_IMAGE})
    with as_floats():
        compare(run(controlled_spec(source, tasks=tasks), jobs), source, jobs)


@pytest.mark.parametrize("kept", ["edges", "depth"])
def test_prompts_of_all_lengths_and_sizes_share_forwards_of_z_image(kept: str, models: Models) -> None:
    """The forwards of a net pad to their own longest prompt; those of the denoiser have other rows."""
    source = models("z-image")
    jobs = [
        a_job(
            f"job{at}",
            prompt="a cat" + " and another" * words,
            controls=(Control(id=kept, scale=scale),),
            width=width,
            height=4096 // width,
            mixed_fields=("size",),
        )
        for at, (words, scale, width) in enumerate(((0, 0.5, 64), (12, 0.5, 64), (3, 0.9, 64), (7, 0.5, 128)))
    ]
    with as_floats():
        recorder = run(controlled_spec(source), jobs)
        compare(recorder, source, jobs)
    assert recorder.rows[:2] == [4, 4]


def test_a_call_of_z_image_has_the_length_of_its_own_longest_prompt() -> None:
    """Tokens are in groups of 32: 64 of 16 x 16 values, 32 of the first prompt, and 64 of the second."""
    image, captions = torch.zeros(4, 1, 16, 16), [torch.zeros(5, 8), torch.zeros(33, 8)]
    outputs = own_tokens({0: torch.zeros(2, 192, 8)}, [image, image], captions)
    assert outputs[0].shape == (2, 128, 8)


def test_the_weights_that_a_net_borrows_are_counted_once(models: Models) -> None:
    source = models("z-image")
    nets = sum(file.stat().st_size for name in NETS for file in Path(f"{source}-{name}").glob("*.safetensors"))
    spec, device = controlled_spec(source), torch.device("cpu")
    both = [load(one, source, device).nbytes for one in (spec, a_spec(source))]
    assert both[0] - both[1] == pytest.approx(nets, rel=0.05)


def test_a_reproducible_job_has_the_same_bits_with_any_batch_mates(models: Models) -> None:
    job = a_job("ours", controls=(Control(id="edges"),), reproducible=True)
    mates = [a_job("none", reproducible=True), a_job("other", controls=(Control(id="depth"),), reproducible=True)]
    with as_floats():
        spec = controlled_spec(models("sd"))
        together, solo = run(spec, [job, *mates]), run(spec, [job])
    assert np.array_equal(together.images["ours", 0], solo.images["ours", 0])
    assert together.finished["ours"].batching.max_jobs == 2


def test_control_nets_count_as_memory_of_their_model(models: Models) -> None:
    source = models("sd")
    plain, controlled = a_spec(source), controlled_spec(source)
    nets = sum(file.stat().st_size for name in NETS for file in Path(f"{source}-{name}").glob("*.safetensors"))
    assert locate(controlled)[1] - locate(plain)[1] == pytest.approx(nets, rel=0.05)
    device = torch.device("cpu")
    assert load(controlled, source, device).nbytes - load(plain, source, device).nbytes == pytest.approx(nets, rel=0.05)


def test_a_task_without_control_pipeline_fails_its_job_and_names_the_field(models: Models) -> None:
    spec = controlled_spec(models("sd3"), tasks=(Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE))
    model = load(spec, Path(spec.source), torch.device("cpu"))
    with pytest.raises(UnusableInput, match=r"^model 'tiny' takes no controls for image_to_image$") as caught:
        model.clone_for(a_job("one", strength=0.5, controls=(Control(id="edges"),)), StepCounter(lambda: None))
    assert caught.value.param == "controls"


@pytest.mark.parametrize(
    ("family", "net", "fields", "words"),
    [
        ("sd", "sdxl-edges", {}, "cross_attention_dim is 64, that of the model 32"),
        ("sd", "flux-edges", {}, "holds a FluxControlNetModel; UNet2DConditionModel needs a ControlNetModel"),
        ("sd", "nowhere", {}, r"control 'a': no control net \(no config.json\) at .*nowhere"),
        ("qwen-image", "qwen-image-edges", {"max_controls": 2}, "QwenImageControlNetModel takes one control of a job"),
        ("lumina-2", "sd-edges", {}, "control nets are not supported with Lumina2Transformer2DModel"),
        ("z-image", "z-image-edges", {"offload": "group"}, "a ZImageControlNetModel uses weights of the denoiser"),
    ],
)
def test_a_net_that_does_not_fit_fails_the_load(
    family: str, net: str, fields: dict[str, Any], words: str, models: Models, tiny_model: Models
) -> None:
    source = tiny_model(family) if family == "lumina-2" else models(family)
    if net != "nowhere":
        models(net.removesuffix("-edges"))
    control = (ControlSpec(id="a", source=str(models("sd").parent / net)),)
    with pytest.raises(ModelUnavailable, match=words):
        load(controlled_spec(source, control=control, **fields), source, torch.device("cpu"))
