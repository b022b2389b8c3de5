"""Which tasks each of diffusers' pipeline classes does, and which models take a last image."""

from __future__ import annotations

import inspect
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
from diffusers.pipelines import auto_pipeline
from harness.engine import a_job, a_spec
from PIL import Image
from tiny.videos.ltx2 import ltx_2

from shared.config.controls import ControlSpec
from shared.config.partial_denoising import takes_part
from shared.errors import InferenceFailed, ModelUnavailable, UnusableInput
from shared.job_fields import PARTS
from shared.tasks import Task
from worker.engine.pipelines.call_arguments import arguments_for
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.task_pipelines import check_structure, pipeline_for, rebuild, supports, takes_last_image


def video_pipeline(pipeline: str, denoiser: dict[str, Any], **config: Any) -> Any:
    """A pipeline with its configuration and its denoiser's, and no modules."""
    instance = object.__new__(getattr(diffusers, pipeline))
    instance.register_to_config(**config)
    instance.__dict__["transformer"] = SimpleNamespace(config=SimpleNamespace(**denoiser))
    return instance


LATENTS = {"image_dim": None, "pos_embed_seq_len": None}


@pytest.mark.parametrize(
    ("pipeline", "taken"),
    [
        (video_pipeline("WanImageToVideoPipeline", LATENTS), None),
        (video_pipeline("WanImageToVideoPipeline", LATENTS, expand_timesteps=True), False),
        (video_pipeline("WanImageToVideoPipeline", {"image_dim": 16, "pos_embed_seq_len": None}), False),
        (video_pipeline("WanImageToVideoPipeline", {"image_dim": 16, "pos_embed_seq_len": 10}), True),
        (video_pipeline("LTX2ImageToVideoPipeline", {}), False),
    ],
    ids=["Wan 2.2 I2V", "Wan 2.2 TI2V", "Wan 2.1 I2V", "Wan 2.1 FLF2V", "LTX-2"],
)
def test_a_last_image_is_accepted_if_the_model_uses_it(pipeline: Any, taken: bool | None) -> None:
    """Some pipelines would ignore it, others fail with an error that no client understands."""
    assert takes_last_image(pipeline) is taken
    without = a_job("x", task=Task.IMAGE_TO_VIDEO, frames=9, fps=24)
    with_last = without.model_copy(update={"last_image": without.images[0]})
    for job, wrong in ((without, taken is True), (with_last, taken is False)):
        if not wrong:
            arguments_for(pipeline, job, 0, InputImages((Image.new("RGB", (8, 8)),)))
            continue
        with pytest.raises(InferenceFailed) as error:
            arguments_for(pipeline, job, 0, InputImages((Image.new("RGB", (8, 8)),)))
        assert error.value.param == "last_image"


@pytest.mark.parametrize(
    ("pipeline", "tasks"),
    [
        ("StableDiffusionPipeline", {Task.TEXT_TO_IMAGE}),
        ("StableDiffusionImg2ImgPipeline", {Task.IMAGE_TO_IMAGE}),
        ("FluxFillPipeline", {Task.INPAINT}),
        ("FluxKontextPipeline", {Task.TEXT_TO_IMAGE, Task.EDIT}),
        ("FluxControlPipeline", {Task.EDIT}),
        ("FluxControlImg2ImgPipeline", {Task.IMAGE_TO_IMAGE}),
        ("FluxControlInpaintPipeline", {Task.INPAINT}),
        ("CogView4ControlPipeline", {Task.EDIT}),
        ("Flux2Pipeline", {Task.TEXT_TO_IMAGE, Task.EDIT}),
        ("GlmImagePipeline", {Task.TEXT_TO_IMAGE, Task.EDIT}),
        ("QwenImageEditPlusPipeline", {Task.EDIT}),
        ("QwenImageLayeredPipeline", {Task.EDIT}),
        ("WanPipeline", {Task.TEXT_TO_VIDEO}),
        ("WanImageToVideoPipeline", {Task.IMAGE_TO_VIDEO}),
        ("HeliosPipeline", {Task.TEXT_TO_VIDEO, Task.IMAGE_TO_VIDEO}),
        ("LTX2ImageToVideoPipeline", {Task.IMAGE_TO_VIDEO}),
        ("LTXConditionPipeline", {Task.TEXT_TO_VIDEO, Task.IMAGE_TO_VIDEO, Task.EXTEND_VIDEO}),
        ("LTX2InContextPipeline", {Task.TEXT_TO_VIDEO, Task.VIDEO_TO_VIDEO}),
        ("WanVideoToVideoPipeline", {Task.VIDEO_TO_VIDEO}),
        ("LucyEditPipeline", {Task.VIDEO_TO_VIDEO}),
        ("Cosmos2_5_TransferPipeline", {Task.VIDEO_TO_VIDEO}),
        ("WanVACEPipeline", {Task.TEXT_TO_VIDEO, Task.EXTEND_VIDEO}),
        ("WanAnimatePipeline", {Task.ANIMATE}),
        ("StableDiffusionUpscalePipeline", {Task.UPSCALE}),
        ("LTXLatentUpsamplePipeline", {Task.UPSCALE_VIDEO}),
        ("LTX2LatentUpsamplePipeline", {Task.UPSCALE_VIDEO}),
        ("Kandinsky6SRPipeline", {Task.UPSCALE_VIDEO}),
        ("SkyReelsV2DiffusionForcingVideoToVideoPipeline", set()),  # it continues one
    ],
)
def test_the_tasks_of_a_class_follow_from_its_calls_parameters(pipeline: str, tasks: set[Task]) -> None:
    """Sibling classes do a model's other tasks."""
    instance = object.__new__(getattr(diffusers, pipeline))
    assert {task for task in Task if supports(task, instance)} == tasks


@pytest.mark.parametrize("pipeline", ["LTX2Pipeline", "LTX2InContextPipeline"])
def test_ltx_2_extends_videos_by_its_sibling(pipeline: str) -> None:
    model = rebuild(diffusers.LTX2Pipeline(**ltx_2().components), getattr(diffusers, pipeline))
    assert type(pipeline_for(Task.EXTEND_VIDEO, model)) is diffusers.LTX2ConditionPipeline


def test_a_model_with_conditions_makes_videos_from_an_image_by_its_sibling() -> None:
    """The call of LTX-2's takes images only in conditions."""
    model = diffusers.LTX2ConditionPipeline(**ltx_2().components)
    assert type(pipeline_for(Task.IMAGE_TO_VIDEO, model)) is diffusers.LTX2ImageToVideoPipeline
    assert type(pipeline_for(Task.VIDEO_TO_VIDEO, model)) is diffusers.LTX2InContextPipeline
    assert pipeline_for(Task.TEXT_TO_VIDEO, model) is model


OUTLINE = {"control": (ControlSpec(id="outline", kind="structure"),)}


@pytest.mark.parametrize(
    ("pipeline", "task", "declared", "fault"),
    [
        ("FluxControlPipeline", Task.EDIT, {}, None),
        ("FluxControlPipeline", Task.EDIT, OUTLINE, None),  # its other tasks use it
        ("FluxControlImg2ImgPipeline", Task.IMAGE_TO_IMAGE, OUTLINE, None),
        ("FluxControlImg2ImgPipeline", Task.IMAGE_TO_IMAGE, {}, "needs a control of kind structure for image_to_image"),
        ("FluxControlInpaintPipeline", Task.INPAINT, {}, "needs a control of kind structure for inpaint"),
        ("FluxInpaintPipeline", Task.INPAINT, OUTLINE, "takes no control of kind structure for inpaint"),
    ],
)
def test_a_load_fails_if_the_control_of_structure_and_the_task_do_not_match(
    pipeline: str, task: Task, declared: dict[str, Any], fault: str | None, tmp_path: Path
) -> None:
    spec = a_spec(tmp_path, tasks=(task,), **declared)
    with nullcontext() if fault is None else pytest.raises(ValueError, match=f"^{pipeline} {fault}$"):
        check_structure(spec, {task: object.__new__(getattr(diffusers, pipeline))})


def test_a_job_without_its_image_of_structure_fails_with_the_field() -> None:
    """Of an old API: it refuses such requests."""
    pipeline = object.__new__(diffusers.FluxControlImg2ImgPipeline)
    pipeline.register_to_config()
    with pytest.raises(UnusableInput, match="needs a control of kind structure for image_to_image") as error:
        arguments_for(pipeline, a_job("x", strength=0.5), 0, InputImages((Image.new("RGB", (64, 64)),)))
    assert error.value.param == "controls"


def test_a_pipeline_that_follows_structure_takes_one_image_of_the_size_of_the_result() -> None:
    """It would take several as a batch, and stretch those of other proportions."""
    pipeline = object.__new__(diffusers.FluxControlPipeline)
    pipeline.register_to_config()
    job = a_job("x", task=Task.EDIT, width=96, height=48)
    inputs = InputImages((Image.new("RGB", (64, 64)),))
    assert arguments_for(pipeline, job, 0, inputs)["control_image"].size == (96, 48)
    with pytest.raises(UnusableInput, match="takes one image, not 2") as error:
        arguments_for(pipeline, job, 0, InputImages(inputs.images * 2))
    assert error.value.param == "images"


def test_a_task_without_a_pipeline_is_refused() -> None:
    """At load, for a task that the models file names."""
    with pytest.raises(ModelUnavailable, match="WanPipeline has no pipeline for edit"):
        pipeline_for(Task.EDIT, object.__new__(diffusers.WanPipeline))


_OF_TASKS = {
    Task.TEXT_TO_IMAGE: auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING,
    Task.IMAGE_TO_IMAGE: auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
    Task.INPAINT: auto_pipeline.AUTO_INPAINT_PIPELINES_MAPPING,
}


@pytest.mark.parametrize("task", _OF_TASKS)
@pytest.mark.parametrize("field", PARTS)
def test_the_pipelines_that_denoise_in_parts_are_listed(field: str, task: Task, tmp_path: Path) -> None:
    """Those of all families for which diffusers has automatic pipelines."""
    classes = {name: one for name, one in _OF_TASKS[task].items() if "controlnet" not in name}
    taken, listed = {}, {}
    for name, pipeline_class in classes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model_index.json").write_text(json.dumps({"_class_name": pipeline_class.__name__}))
        taken[name] = field in inspect.signature(pipeline_class.__call__).parameters
        listed[name] = takes_part(field, tmp_path / name, task, with_nets=False)
    assert listed == taken
    assert any(taken.values()) or (field, task) == ("denoising_start", Task.TEXT_TO_IMAGE)
