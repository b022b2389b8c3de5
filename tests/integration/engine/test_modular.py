"""Modular pipelines are served as classic ones are, or refused with a sentence that says why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from harness.adapters import adapters_of, mixable, run_together, spec_with
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec
from parity.running import TOLERANCE, as_floats
from tiny import lora

from shared.errors import ModelUnavailable
from shared.job import Job
from shared.tasks import Task
from worker.engine.protocol import ModelLoaded

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

INDEX = "modular_model_index.json"
Change = Callable[[Path], None]


def edit_index(edit: Callable[[dict[str, Any]], None]) -> Change:
    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        edit(index)
        (folder / INDEX).write_text(json.dumps(index))

    return change


def of_library(part: str, library: str, name: str) -> Change:
    return edit_index(lambda index: index[part][2].update(type_hint=[library, name]))


def with_guider(name: str) -> Change:
    def change(folder: Path) -> None:
        options = {"skip_layer_guidance_layers": [0]} if name == "SkipLayerGuidance" else {}
        getattr(diffusers, name)(**options).save_pretrained(str(folder / "guider"))
        source = {"pretrained_model_name_or_path": str(folder), "subfolder": "guider"}
        entry = ["diffusers", name, {"type_hint": ["diffusers", name], **source}]
        edit_index(lambda index: index.update(guider=entry))(folder)

    return change


def without_folder(part: str) -> Change:
    return lambda folder: shutil.rmtree(folder / part)


def in_a_repository(part: str) -> Change:
    def change(folder: Path) -> None:
        shutil.rmtree(folder / part)
        edit_index(lambda index: index[part][2].update(pretrained_model_name_or_path="some/where"))(folder)

    return change


@pytest.fixture
def changed(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[[Change], Path]:
    """Return a copy of a modular XL with a change."""

    def copy(change: Change) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny_model("modular-sdxl"), folder)
        change(folder)
        return folder

    return copy


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (edit_index(lambda index: index.update(_class_name="Mine")), "names 'Mine' as its _class_name, which is not"),
        (edit_index(lambda index: index.update(_blocks_class_name="My")), "'My' as its _blocks_class_name"),
        (edit_index(lambda index: index.update(_class_name="FluxPipeline")), "FluxPipeline is no modular pipeline"),
        (of_library("scheduler", "json", "JSONDecoder"), "its scheduler is no class of diffusers or transformers"),
        (without_folder("vae"), "it has no folder vae"),
        (edit_index(lambda index: index["vae"][2].update(subfolder="../vae")), "places its vae outside of a folder"),
        (edit_index(lambda index: index["vae"][2].update(subfolder="/etc")), "places its vae outside of a folder"),
        (edit_index(lambda index: index["vae"][2].update(revision="../x")), "places its vae outside of a folder"),
        (in_a_repository("vae"), "it has no folder vae, and some/where, which modular_model_index.json names"),
        (edit_index(lambda index: index.pop("unet")), "StableDiffusionXLModularPipeline needs unet for text_to_image"),
        (with_guider("SkipLayerGuidance"), "its guider, SkipLayerGuidance, changes the denoiser, which jobs share"),
    ],
)
def test_what_cannot_be_served_is_refused(change: Change, sentence: str, changed: Callable[[Change], Path]) -> None:
    error = EngineHarness(a_spec(changed(change))).run(a_job("one")).finished["one"].error
    assert isinstance(error, ModelUnavailable)
    assert sentence in error.message


def test_a_task_that_no_blocks_do_is_refused_with_what_they_lack(tiny_model: Callable[[str], Path]) -> None:
    spec = a_spec(tiny_model("modular-flux"), tasks=(Task.INPAINT,))
    error = EngineHarness(spec).run(a_job("one", task=Task.INPAINT)).finished["one"].error
    assert isinstance(error, ModelUnavailable)
    assert error.message == "FluxModularPipeline does not do inpaint: it takes no mask_image"


def test_a_copied_folder_needs_no_other_place(changed: Callable[[Change], Path]) -> None:
    """Its index names the folder in which it was saved, or the repository."""

    def name_another(index: dict[str, Any]) -> None:
        for entry in index.values():
            if isinstance(entry, list) and entry[2]["subfolder"]:
                entry[2].update(pretrained_model_name_or_path="some/where")

    assert (
        EngineHarness(a_spec(changed(edit_index(name_another)))).run(a_job("one", steps=2)).finished["one"].error
        is None
    )


@pytest.mark.parametrize("guider", ["ClassifierFreeZeroStarGuidance", "AdaptiveProjectedGuidance"])
def test_guiders_that_read_outputs_only_are_served(guider: str, changed: Callable[[Change], Path]) -> None:
    """Each image has its own: batch mates at other steps do not change it."""
    folder = changed(with_guider(guider))
    jobs = [a_job("one", steps=3), a_job("two", steps=5, guidance_scale=7.0, prompt="a fox")]
    with as_floats():
        together = EngineHarness(a_spec(folder)).run(*jobs)
        for job in jobs:
            alone = EngineHarness(a_spec(folder)).run(job)
            assert np.abs(together.images[job.id, 0] - alone.images[job.id, 0]).max() <= TOLERANCE
    assert together.rows[0] == 2


def call_plain(plain: Any, job: Job, **more: Any) -> np.ndarray:
    """Return the image [height, width, 3] of a plain modular pipeline."""
    values = {name: getattr(job, name) for name in ("prompt", "width", "height")}
    if "guider" in plain.components:
        plain.guider = plain.guider.new(guidance_scale=job.guidance_scale)
    else:
        values["guidance_scale"] = job.guidance_scale
    generator = torch.Generator().manual_seed(job.seed)
    state = plain(num_inference_steps=job.steps, generator=generator, output_type="np", **values, **more)
    return np.asarray(state.images[0])


@pytest.mark.parametrize(("family", "denoiser"), [("modular-sdxl", "unet"), ("modular-flux", "transformer")])
def test_adapters_are_applied_per_row(
    family: str, denoiser: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """As the plain modular pipeline applies them."""
    folder = tiny_model(family)
    plain: Any = diffusers.ModularPipeline.from_pretrained(str(folder))
    plain.load_components()
    file = lora.save(plain, tmp_path / "ink.safetensors", 1, components=(denoiser,))
    jobs = [mixable(a_job("no", steps=3)), mixable(a_job("ink", steps=3, adapters=adapters_of(("ink", 1.0))))]
    with as_floats():
        recorder = run_together(spec_with(folder, {"ink": file}), *jobs)
    assert recorder.rows == [2] * len(recorder.rows)
    plain.load_lora_weights(str(tmp_path), weight_name=file.name)
    made_by_plain = call_plain(plain, jobs[1])
    made = np.moveaxis(recorder.images["ink", 0], 0, -1)
    assert np.abs(made - made_by_plain).max() <= TOLERANCE
    assert np.abs(made - np.moveaxis(recorder.images["no", 0], 0, -1)).max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["modular-sdxl", "modular-flux", "modular-qwen-image"])
def test_previews_and_steps_are_reported(family: str, tiny_model: Callable[[str], Path]) -> None:
    recorder = EngineHarness(a_spec(tiny_model(family))).run(a_job("one", steps=6, previews=2))
    assert [entry for entry in recorder.log if entry[0] == "preview"] == 2 * [("preview", "one", 0)]
    assert [entry for entry in recorder.log if entry[0] == "progress"][-1] == ("progress", "one", 6, 6)


def test_a_preview_equals_that_of_the_classic_pipeline(tiny_model: Callable[[str], Path]) -> None:
    """Their parts are the same."""
    job = a_job("one", steps=4, previews=2)
    modular, classic = (EngineHarness(a_spec(tiny_model(name))).run(job).previews for name in ("modular-flux", "flux"))
    assert all(np.array_equal(one, other) for one, other in zip(modular, classic, strict=True))


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "bfloat16"},
        {"layerwise_casting": "float8_e4m3fn"},
        {"vae_tiling": True},
        {"schedulers": ("EulerDiscreteScheduler",)},
    ],
)
def test_keys_of_models_work(fields: dict[str, Any], tiny_model: Callable[[str], Path]) -> None:
    jobs = [a_job("one", steps=2), a_job("two", steps=2, scheduler=next(iter(fields.get("schedulers", ())), None))]
    recorder = EngineHarness(a_spec(tiny_model("modular-sdxl"), **fields)).run(*jobs)
    assert [recorder.finished[job.id].error for job in jobs] == [None, None]
    assert recorder.rows[0] == 2


def test_inputs_without_a_field_of_their_own_are_given_by_extra(tiny_model: Callable[[str], Path]) -> None:
    """As in a plain call, while batch mates have none; what the pipeline does not declare ends the job."""
    folder = tiny_model("modular-sdxl")
    spec = a_spec(folder, schedulers=("DDIMScheduler",), extra=("eta", "boxes"))
    jobs = [
        a_job(name, steps=2, scheduler="DDIMScheduler", extra=extra)
        for name, extra in (("noisy", {"eta": 1.0}), ("quiet", None), ("wrong", {"eta": "1"}), ("none", {"boxes": []}))
    ]
    with as_floats():
        recorder = EngineHarness(spec).run(*jobs)
    errors = {name: error for name in ("wrong", "none") if (error := recorder.finished[name].error) is not None}
    assert {name: error.param for name, error in errors.items()} == {"wrong": "extra.eta", "none": "extra.boxes"}
    assert errors["wrong"].message == "extra.eta: '1' is not of type 'number'"
    plain: Any = diffusers.ModularPipeline.from_pretrained(str(folder))
    plain.load_components()
    plain.scheduler = diffusers.DDIMScheduler.from_config(plain.scheduler.config)
    images = {job.id: call_plain(plain, job, **(job.extra or {})) for job in jobs[:2]}
    for name, image in images.items():
        assert np.abs(np.moveaxis(recorder.images[name, 0], 0, -1) - image).max() <= TOLERANCE
    assert np.abs(images["noisy"] - images["quiet"]).max() > 100 * TOLERANCE


def test_a_loaded_model_describes_its_inputs(tiny_model: Callable[[str], Path]) -> None:
    """Those that a job cannot give, and those with a field, are not among them."""
    recorder = EngineHarness(a_spec(tiny_model("modular-sdxl"))).run(a_job("one", steps=1))
    (loaded,) = (event for event in recorder.model_events if isinstance(event, ModelLoaded))
    inputs = {one.name: one for one in loaded.inputs}
    assert inputs.keys() == {"eta", "aesthetic_score", "negative_aesthetic_score"}
    assert (inputs["eta"].type_schema, inputs["eta"].default) == ({"type": "number"}, 0.0)
    assert inputs["aesthetic_score"].tasks == (Task.IMAGE_TO_IMAGE,)


def with_variant(part: str) -> Change:
    """Keep the weights of a part as those of a variant."""

    def change(folder: Path) -> None:
        (file,) = (folder / part).glob("*.safetensors")
        file.rename(file.with_name(f"{file.stem}.fp16.safetensors"))

    return change


def test_parts_without_weights_of_the_variant_have_plain_ones(changed: Callable[[Change], Path]) -> None:
    spec = a_spec(changed(with_variant("unet")), variant="fp16")
    assert EngineHarness(spec).run(a_job("one", steps=2)).finished["one"].error is None


def test_a_variant_that_no_part_has_is_refused(changed: Callable[[Change], Path]) -> None:
    spec = a_spec(changed(with_variant("unet")), variant="bf16")
    error = EngineHarness(spec).run(a_job("one", steps=2)).finished["one"].error
    assert isinstance(error, ModelUnavailable)
    assert error.message.endswith("none of its parts has weights of the variant 'bf16'; correct the model's variant")
