"""Jobs whose last steps the refiner of their model makes: one job instead of two, beside jobs of any other shares."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from compel import Compel, ReturnedEmbeddingsType
from diffusers import (
    ControlNetModel,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from harness.adapters import adapters_of, load_pipeline, mixable, run_together
from harness.embeddings import Embedding, a_job_with, make_embeddings, spec_with
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder, a_job, a_spec, input_files
from parity.running import TOLERANCE, as_floats, compare, plain_results
from tiny import controls, lora
from transformers import CLIPImageProcessorPil

from shared.config.adapters import AdapterSpec
from shared.config.controls import Control, ControlSpec
from shared.config.model_spec import ModelSpec
from shared.config.refiners import RefinerSpec
from shared.config.step_schedules import StepSchedule, computed_steps
from shared.errors import LoadPostponed
from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.pipelines.loading import load, locate
from worker.engine.protocol import EngineEvent, JobProgress
from worker.engine.weights.requirements import component_bytes, model_bytes

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

STEPS = 6
COMMON: dict[str, Any] = {"steps": STEPS, "guidance_scale": 6.0, "negative_prompt": "rain"}


@pytest.fixture(scope="module")
def refiner(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("sdxl-refiner")


def refined_spec(base: Path, refiner: Path, **fields: Any) -> ModelSpec:
    return a_spec(base, max_batch=16, refiner=RefinerSpec(source=str(refiner)), **fields)


def prompts(_pipeline: Any, job: Job) -> dict[str, Any]:
    return {"prompt": job.prompt, "negative_prompt": job.negative_prompt}


def weighted(pipeline: Any, job: Job) -> dict[str, Any]:
    """Return the embeddings of prompts with weights in compel's syntax, `(word)1.4`."""
    values = {}
    for name, text in (("", job.prompt), ("negative_", job.negative_prompt or "")):
        states = []
        for number in ("", "_2"):
            tokenizer, encoder = (getattr(pipeline, f"{part}{number}") for part in ("tokenizer", "text_encoder"))
            if encoder is not None:
                layer = ReturnedEmbeddingsType.PENULTIMATE_HIDDEN_STATES_NON_NORMALIZED
                states.append(Compel(tokenizer, encoder, returned_embeddings_type=layer)(text))
        words = re.sub(r"\((.*?)\)[\d.]+", r"\1", text)
        ids = pipeline.tokenizer_2(words, padding="max_length", max_length=77, return_tensors="pt").input_ids
        values[f"{name}prompt_embeds"] = torch.cat(states, dim=-1)
        values[f"{name}pooled_prompt_embeds"] = pipeline.text_encoder_2(ids)[0]
    return values


@dataclass(frozen=True)
class Plain:
    """diffusers' two pipelines, called as its documentation of the refiner does, with the base's VAE."""

    base: Any
    refiner: Any
    net: Any = None
    texts: Callable[[Any, Job], dict[str, Any]] = prompts

    @staticmethod
    def of(base_folder: Path, refiner_folder: Path, *shared: str) -> Plain:
        base = StableDiffusionXLPipeline.from_pretrained(base_folder)
        parts = {name: base.components[name] for name in ("vae", *shared)}
        return Plain(base, StableDiffusionXLImg2ImgPipeline.from_pretrained(refiner_folder, **parts))

    def learn(self, embedding: Embedding) -> None:
        """Load an embedding into the text encoders of the base."""
        for name, vectors in embedding.vectors.items():
            parts = {"tokenizer": self.base.components[name.replace("text_encoder", "tokenizer")]}
            parts["text_encoder"] = self.base.components[name]
            self.base.load_textual_inversion({"emb": vectors}, token=embedding.token, **parts)

    def image(self, job: Job) -> np.ndarray:
        """Return the image of a job as floats [channels, height, width]."""
        common = {"guidance_scale": job.guidance_scale, "num_inference_steps": job.steps}
        inputs = decode_inputs(job, input_files(job))
        first, size = self.base, {"width": job.width, "height": job.height}
        if job.task is Task.IMAGE_TO_IMAGE:
            first = StableDiffusionXLImg2ImgPipeline(**self.base.components)
            size = {"image": inputs.images[0], "strength": job.strength}
        for control, image in zip(job.controls, inputs.controls, strict=True):
            if control.kind == "controlnet":
                first = StableDiffusionXLControlNetPipeline(**self.base.components, controlnet=self.net)
            size |= {"image" if control.kind == "controlnet" else "ip_adapter_image": image}
        own = {"denoising_end": job.refiner_start, "output_type": "latent"}
        latents = _called(first, job, **self.texts(first, job), **common, **size, **own).images
        rest = {"image": latents, "denoising_start": job.refiner_start, "output_type": "pt"}
        return np.asarray(_called(self.refiner, job, **self.texts(self.refiner, job), **common, **rest).images[0])


def _called(pipeline: Any, job: Job, **arguments: Any) -> Any:
    own = pipeline.scheduler
    scheduler_class = type(own) if job.scheduler is None else getattr(diffusers, job.scheduler)
    pipeline.scheduler = scheduler_class.from_config(own.config)
    try:
        return pipeline(**arguments, generator=torch.Generator().manual_seed(job.seed))
    finally:
        pipeline.scheduler = own


REFINED = (
    a_job("early", refiner_start=0.5, **COMMON),
    a_job("late", refiner_start=0.8, **COMMON),
    a_job("late-too", refiner_start=0.8, **{**COMMON, "guidance_scale": 9.0, "negative_prompt": None}),
    a_job("ancestral", refiner_start=0.5, scheduler="EulerAncestralDiscreteScheduler", **COMMON),
    a_job("heun", refiner_start=0.6, scheduler="HeunDiscreteScheduler", **COMMON),
    a_job("from-image", refiner_start=0.8, strength=0.7, **COMMON),
)


def difference(images: dict[tuple[str, int], np.ndarray], plain: Plain, *jobs: Job) -> float:
    return max(float(np.abs(images[job.id, 0] - plain.image(job)).max()) for job in jobs)


def run(spec: ModelSpec, *jobs: Job, **settings: Any) -> EventRecorder:
    recorder = EngineHarness(spec, **settings).run(*jobs)
    assert {name: one.error for name, one in recorder.finished.items() if one.error} == {}
    return recorder


def test_refined_jobs_equal_plain_base_and_refiner(tiny_model: Callable[[str], Path], refiner: Path) -> None:
    """In batches with jobs of other shares, schedulers and tasks, and without a refiner."""
    base = tiny_model("sdxl")
    alone = (a_job("alone", **COMMON), a_job("alone-too", strength=0.5, **COMMON))
    with as_floats():
        made = run(refined_spec(base, refiner), *REFINED, *alone)
        assert difference(made.images, Plain.of(base, refiner), *REFINED) <= TOLERANCE
        outputs = {key: one for key, one in made.outputs.items() if key[0].startswith("alone")}
        made.outputs, made.images = outputs, {key: made.images[key] for key in outputs}
        assert compare(made, plain_results(base, list(alone))) <= TOLERANCE
    assert made.rows[0] == len(REFINED) + len(alone)


def test_base_and_refiner_each_share_their_forwards(tiny_model: Callable[[str], Path], refiner: Path) -> None:
    """Of six steps, `late` has four by the base and `early` two; the oldest job at a step decides who goes on."""
    jobs = (REFINED[1], REFINED[0], a_job("alone", **COMMON))
    made = run(refined_spec(tiny_model("sdxl"), refiner), *jobs)
    base_together, base_of_two, refiner_of_two, refiner_alone, base_alone = [3] * 2, [2] * 2, [2] * 2, [1] * 2, [1] * 2
    assert made.rows == base_together + base_of_two + refiner_of_two + refiner_alone + base_alone
    assert {name: one.batching.forwards for name, one in made.finished.items()} == {job.id: STEPS for job in jobs}
    assert {one.batching.solo_reason for one in made.finished.values()} == {None}


def test_each_image_of_a_job_has_its_own_seed(tiny_model: Callable[[str], Path], refiner: Path) -> None:
    spec = refined_spec(tiny_model("sdxl"), refiner)
    several = a_job("several", n=2, **{**COMMON, "refiner_start": 0.5})
    single = [several.model_copy(update={"id": f"one-{at}", "n": 1, "seed": several.seed + at}) for at in range(2)]
    with as_floats():
        made = run(spec, several, *single)
    for at in range(2):
        assert np.abs(made.images["several", at] - made.images[f"one-{at}", 0]).max() <= TOLERANCE
    assert np.abs(made.images["several", 0] - made.images["several", 1]).max() > 100 * TOLERANCE


def test_a_reproducible_job_is_bit_identical_in_any_company(tiny_model: Callable[[str], Path], refiner: Path) -> None:
    spec = refined_spec(tiny_model("sdxl"), refiner)
    exact = REFINED[1].model_copy(update={"reproducible": True})
    others = [one.model_copy(update={"reproducible": True}) for one in (REFINED[0], REFINED[3], REFINED[5])]
    alone = run(spec, exact).images[exact.id, 0]
    made = run(spec, *others, exact)
    assert np.array_equal(made.images[exact.id, 0], alone)
    assert max(made.rows) > 1


def test_progress_and_previews_are_those_of_both_parts(tiny_model: Callable[[str], Path], refiner: Path) -> None:
    """A total of the base's steps only would make a worker claim the next batch too early."""
    spec = refined_spec(tiny_model("sdxl"), refiner)
    made = run(spec, *(one.model_copy(update={"previews": 3}) for one in REFINED if one.scheduler is None))
    for job in (one for one in REFINED if one.scheduler is None):
        steps = int(STEPS * (job.strength or 1))
        progress = [entry[2:] for entry in made.log if entry[:2] == ("progress", job.id)]
        assert [step for step, _ in progress] == list(range(1, steps + 1)), job.id
        assert {total for _, total in progress} == {steps}, job.id
        assert made.log.count(("preview", job.id, 0)) == 3, job.id


def test_a_refined_job_is_canceled_at_a_step_of_its_refiner(tiny_model: Callable[[str], Path], refiner: Path) -> None:
    early, late = REFINED[0], REFINED[1]
    recorder = EventRecorder()
    harness = EngineHarness(refined_spec(tiny_model("sdxl"), refiner), recorder=recorder)
    note = recorder.on_event

    def cancel_at_the_last_step(event: EngineEvent) -> None:
        note(event)
        if isinstance(event, JobProgress) and (event.claim_key, event.step) == (early.id, STEPS - 1):
            harness.engine.cancel(early.id)

    harness.recorder.on_event = cancel_at_the_last_step  # type: ignore[method-assign]
    harness.run(early, late)
    assert (recorder.finished[early.id].canceled, recorder.finished[late.id].canceled) == (True, False)
    assert list(recorder.images) == [(late.id, 0)]


@pytest.mark.parametrize(("start", "part"), [(0.01, "model"), (0.999, "refiner")])
def test_a_share_that_leaves_a_part_no_step_fails(
    start: float, part: str, tiny_model: Callable[[str], Path], refiner: Path
) -> None:
    """In plain diffusers the image would be noise."""
    job = a_job("job", refiner_start=start, **COMMON)
    error = EngineHarness(refined_spec(tiny_model("sdxl"), refiner)).run(job).finished["job"].error
    assert error is not None
    assert error.param == "refiner_start"
    assert error.message.startswith(f"refiner_start: {start} leaves the {part} none of the 6 steps")


def test_a_job_of_a_model_that_has_lost_its_refiner_fails(tiny_model: Callable[[str], Path]) -> None:
    error = EngineHarness(a_spec(tiny_model("sdxl"))).run(REFINED[0]).finished["early"].error
    assert error is not None
    assert (error.param, error.message) == ("refiner_start", "refiner_start: model 'tiny' has no refiner")


def test_weighted_prompts_are_read_by_base_and_refiner(tiny_model: Callable[[str], Path], refiner: Path) -> None:
    spec = refined_spec(tiny_model("sdxl"), refiner, prompt_syntax="weights")
    job = a_job("weighted", prompt="a (red:1.4) hill", refiner_start=0.5, **COMMON)
    with as_floats():
        made = run(spec, REFINED[0], job)
        plain = Plain.of(tiny_model("sdxl"), refiner)
        assert difference(made.images, plain, REFINED[0]) <= TOLERANCE
        named = job.model_copy(update={"prompt": "a (red)1.4 hill"})
        assert difference(made.images, replace(plain, texts=weighted), named) <= TOLERANCE
        assert difference(made.images, plain, job.model_copy(update={"prompt": "a red hill"})) > 10 * TOLERANCE


def test_step_caching_skips_steps_of_a_long_base(tiny_model: Callable[[str], Path], refiner: Path) -> None:
    """It has 23 of 30: those from time 200 of 1000 on. The refiner's are a loop of their own, too few to skip any."""
    schedule = StepSchedule(every=3)
    job = a_job("job", refiner_start=0.8, **{**COMMON, "steps": 30, "step_cache": schedule})
    ended = run(refined_spec(tiny_model("sdxl"), refiner), job).finished["job"]
    assert ended.batching.skipped_steps == 23 - len(computed_steps(23, schedule)) > 0
    assert ended.batching.forwards == 30 - ended.batching.skipped_steps


def test_adapters_change_the_base_only(tiny_model: Callable[[str], Path], refiner: Path, tmp_path: Path) -> None:
    """The file fits the denoiser of the refiner as well."""
    base = tiny_model("sdxl")
    file = lora.save(load_pipeline(base), tmp_path / "ink.safetensors", 1, ("unet",))
    spec = refined_spec(base, refiner, adapter=(AdapterSpec(id="ink", source=str(file)),))
    inked = mixable(REFINED[0]).model_copy(update={"adapters": adapters_of(("ink", 1.0))})
    with as_floats():
        made = run_together(spec, inked, mixable(REFINED[1]))
        plain = Plain.of(base, refiner)
        assert difference(made.images, plain, REFINED[1]) <= TOLERANCE
        plain.base.load_lora_weights(str(file.parent), weight_name=file.name)
        assert difference(made.images, plain, inked) <= TOLERANCE
        assert difference(made.images, Plain.of(base, refiner), inked) > 100 * TOLERANCE
    assert made.rows[0] == 2


def test_a_control_net_guides_the_base_only(tiny_model: Callable[[str], Path], refiner: Path, tmp_path: Path) -> None:
    base = tiny_model("sdxl")
    source = controls.save(base, tmp_path / "edges", 1)
    spec = refined_spec(base, refiner, control=(ControlSpec(id="edges", source=str(source)),))
    job = a_job("job", refiner_start=0.5, controls=(Control(id="edges"),), **COMMON)
    plain = Plain.of(base, refiner)
    with as_floats():
        made = run(spec, job, REFINED[0])
        net = ControlNetModel.from_pretrained(source)
        assert difference(made.images, replace(plain, net=net), job) <= TOLERANCE
        assert difference(made.images, plain, REFINED[0]) <= TOLERANCE


def test_an_ip_adapter_guides_the_base_only(tiny_model: Callable[[str], Path], refiner: Path, tmp_path: Path) -> None:
    base = tiny_model("sdxl")
    source = controls.save_ip_adapter(base, tmp_path / "style", 1)
    style = ControlSpec(id="style", kind="ip_adapter", source=str(source), weight_name="ip-adapter.safetensors")
    spec = refined_spec(base, refiner, control=(style,))
    job = a_job("job", refiner_start=0.5, controls=(Control(id="style", kind="ip_adapter"),), **COMMON)
    plain = Plain.of(base, refiner)
    with as_floats():
        made = run(spec, job, REFINED[0])
        assert difference(made.images, plain, REFINED[0]) <= TOLERANCE
        plain.base.register_modules(feature_extractor=CLIPImageProcessorPil(size=30, crop_size=30))
        plain.base.load_ip_adapter(
            str(source), subfolder="", weight_name=style.weight_name, image_encoder_folder="image_encoder"
        )
        plain.base.set_ip_adapter_scale(1.0)
        assert difference(made.images, plain, job) <= TOLERANCE


def with_encoder(base: Path, refiner: Path, folder: Path, kind: str) -> Path:
    """Return a refiner whose text encoder has the `same` files as the base, or that has `none`."""
    shutil.copytree(refiner, folder / kind)
    shutil.rmtree(folder / kind / "text_encoder_2")
    if kind == "same":
        shutil.copytree(base / "text_encoder_2", folder / kind / "text_encoder_2")
    else:
        for part in ("vae", "tokenizer_2"):
            shutil.rmtree(folder / kind / part)
    return folder / kind


@pytest.mark.parametrize("kind", ["same", "none"])
def test_a_refiner_shares_a_text_encoder_that_is_the_same(
    kind: str, tiny_model: Callable[[str], Path], refiner: Path, tmp_path: Path
) -> None:
    """It takes no memory for it, and reads embeddings that change it."""
    base, job = tiny_model("sdxl"), REFINED[0]
    files = make_embeddings(base, tmp_path)
    worded = a_job_with("worded", "dog", prompt="a red <cat> on a hill", refiner_start=0.5, **COMMON)
    source = with_encoder(base, refiner, tmp_path, kind)
    own, spec = (spec_with(base, files, refiner=RefinerSpec(source=str(one))) for one in (refiner, source))
    with as_floats():
        made = run_together(spec, job, worded)
        plain = Plain.of(base, source, "text_encoder_2", "tokenizer_2")
        assert difference(made.images, plain, job) <= TOLERANCE
        assert difference(made.images, Plain.of(base, refiner), job) > 10 * TOLERANCE
        plain.learn(files["dog"])
        assert difference(made.images, plain, worded) <= TOLERANCE
    encoder = component_bytes(base / "text_encoder_2", spec)
    assert model_bytes(own, base) - model_bytes(spec, base) == encoder
    loaded = [load(one, base, torch.device("cpu")).nbytes for one in (own, spec)]
    assert loaded[0] - loaded[1] >= encoder


def test_a_refiner_with_a_text_encoder_of_its_own_does_not_know_embeddings(
    tiny_model: Callable[[str], Path], refiner: Path, tmp_path: Path
) -> None:
    base = tiny_model("sdxl")
    files = make_embeddings(base, tmp_path)
    spec = spec_with(base, files, refiner=RefinerSpec(source=str(refiner)))
    worded = a_job_with("worded", "dog", prompt="a red <cat> on a hill", refiner_start=0.5, **COMMON)
    with as_floats():
        made = run(spec, worded)
        plain = Plain.of(base, refiner)
        plain.learn(files["dog"])
        assert difference(made.images, plain, worded) <= TOLERANCE


def test_any_model_of_the_same_latents_can_refine(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Such as another checkpoint of XL, whose first text encoder is the base's as well."""
    base = other = tiny_model("sdxl")
    with as_floats():
        made = run(refined_spec(base, other), REFINED[0])
        plain = Plain.of(base, other, "text_encoder", "text_encoder_2")
        assert difference(made.images, plain, REFINED[0]) <= TOLERANCE
    nbytes = model_bytes(refined_spec(base, other), base)
    assert nbytes == model_bytes(a_spec(base), base) + component_bytes(base / "unet", a_spec(base))


def test_the_weights_of_both_denoisers_are_cast(tiny_model: Callable[[str], Path], refiner: Path) -> None:
    base, cast = tiny_model("sdxl"), {"layerwise_casting": "float8_e4m3fn"}
    specs = [(a_spec(base, **fields), refined_spec(base, refiner, **fields)) for fields in (dict[str, Any](), cast)]
    added = [[load(one, base, torch.device("cpu")).nbytes for one in both] for both in specs]
    plain, small = (refined - alone for alone, refined in added)
    assert small < 0.5 * plain
    expected = model_bytes(specs[1][1], base) - model_bytes(specs[1][0], base)
    assert abs(small - expected) < 0.1 * expected


@pytest.mark.parametrize(
    ("base", "source", "message"),
    [
        ("sd", "sdxl-refiner", "refiner: StableDiffusionPipeline leaves no steps to one"),
        ("sdxl", "sd", "refiner: StableDiffusionImg2ImgPipeline does not go on from latents"),
        ("sdxl", "none", "holds no diffusers pipeline (no model_index.json)"),
    ],
)
def test_a_refiner_that_does_not_fit_is_refused_at_load(
    base: str, source: str, message: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").touch()
    spec = refined_spec(tiny_model(base), tmp_path if source == "none" else tiny_model(source))
    error = EngineHarness(spec, fresh=("tiny",)).run(REFINED[0]).finished["early"].error
    assert error is not None
    assert error.code == "model_unavailable"
    assert message in error.message


def test_the_load_of_a_model_is_repeated_while_nothing_is_where_its_refiner_will_be(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its file system can be mounted later."""
    with pytest.raises(LoadPostponed, match=r"nothing is at .*/mount/refiner, nor beside it"):
        locate(refined_spec(tiny_model("sdxl"), tmp_path / "mount" / "refiner"))


def test_an_incomplete_refiner_is_refused_at_load(
    tiny_model: Callable[[str], Path], refiner: Path, tmp_path: Path
) -> None:
    shutil.copytree(refiner, tmp_path / "refiner")
    shutil.rmtree(tmp_path / "refiner" / "unet")
    spec = refined_spec(tiny_model("sdxl"), tmp_path / "refiner")
    error = EngineHarness(spec, fresh=("tiny",)).run(REFINED[0]).finished["early"].error
    assert error is not None
    assert "it has no folder unet, which model_index.json lists" in error.message
