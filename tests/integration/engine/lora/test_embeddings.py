"""Embeddings: images equal those of diffusers' `load_textual_inversion`, in batches with any other jobs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compel import Compel, DiffusersTextualInversionManager, SplitLongTextMode
from harness.adapters import load_pipeline, run_together
from harness.embeddings import Embedding, a_job_with, make_embeddings, plain_image, plain_pipeline, spec_with
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder
from parity.running import TOLERANCE, as_floats
from safetensors.torch import save_file
from tiny import lora

from shared.config.adapters import AdapterSpec
from shared.config.model_spec import ModelSpec
from shared.errors import AdapterUnavailable
from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines.call_arguments import arguments_for
from worker.engine.pipelines.call_results import make_results
from worker.engine.pipelines.input_images import InputImages

pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY, "ignore:.*FluxPosEmbed"),
    pytest.mark.usefixtures("shared_models"),
]

Files = Callable[[str], dict[str, Embedding]]


@pytest.fixture(autouse=True)
def floats() -> Iterator[None]:
    with as_floats():
        yield


@pytest.fixture(scope="module")
def files(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return cache(lambda family: make_embeddings(tiny_models / family, tmp_path_factory.mktemp(family)))


def jobs_with_embeddings() -> list[Job]:
    return [
        a_job_with("one vector", "cat", prompt="a red <cat> on a hill"),
        a_job_with("same word", "dog", prompt="a red <cat> on a hill"),
        a_job_with("same word and tokens", "fox", prompt="a red <cat> on a hill"),
        a_job_with("negative", "easy", prompt="a town", negative_prompt="EasyNeg, rain"),
        a_job_with("negative of several", "bad", prompt="a town", negative_prompt="rain, bad-hands-5, fog"),
        a_job_with("both", "bad", "dog", prompt="<cat>, <cat>'s hat", negative_prompt="bad-hands-5"),
        a_job_with("without its word", "cat", prompt="a red hill"),
        a_job_with("its word without it", prompt="a red <cat> on a hill", negative_prompt="EasyNeg, rain"),
    ]


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_jobs_with_different_embeddings_and_none_share_one_forward(
    family: str, tiny_models: Path, files: Files
) -> None:
    source, jobs = tiny_models / family, jobs_with_embeddings()
    recorder = run_together(spec_with(source, files(family)), *jobs)
    assert not {name: ended.error.message for name, ended in recorder.finished.items() if ended.error}
    for job in jobs:
        off = np.abs(recorder.images[job.id, 0] - plain_image(source, files(family), job)).max()
        assert off <= TOLERANCE, f"{job.id} is off by {off}"
        if job.adapters and job.id != "without its word":
            bare = job.model_copy(update={"adapters": ()})
            assert np.abs(recorder.images[job.id, 0] - plain_image(source, {}, bare)).max() > 1e-2, job.id
    assert recorder.rows == [8, 8, 8]


def test_xl_reads_the_pooled_state_where_diffusers_does(tiny_models: Path, files: Files, tmp_path: Path) -> None:
    """The configuration of the published weights has another end of texts than their tokenizer."""
    source, job = tmp_path / "sdxl", a_job_with("published", "dog", prompt="a red <cat> on a hill")
    shutil.copytree(tiny_models / "sdxl", source)
    file = source / "text_encoder_2" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 2}))
    recorder = run(spec_with(source, files("sdxl")), [job])
    assert np.abs(recorder.images[job.id, 0] - plain_image(source, files("sdxl"), job)).max() <= TOLERANCE
    other = plain_image(tiny_models / "sdxl", files("sdxl"), job)
    assert np.abs(recorder.images[job.id, 0] - other).max() > 1e-3


def run(spec: ModelSpec, jobs: Sequence[Job], **settings: Any) -> EventRecorder:
    recorder = EngineHarness(spec, **settings).run(*jobs)
    assert not {name: ended.error.message for name, ended in recorder.finished.items() if ended.error}
    return recorder


def test_a_model_whose_other_text_encoder_is_t5_takes_embeddings_of_its_clip(tiny_models: Path, files: Files) -> None:
    """As diffusers' FLUX does."""
    source, job = tiny_models / "flux", a_job_with("flux", "dog", prompt="a red <cat> on a hill", steps=2)
    recorder = run(spec_with(source, files("flux")), [job])
    assert np.abs(recorder.images["flux", 0] - plain_image(source, files("flux"), job)).max() <= TOLERANCE
    bare = plain_image(source, {}, job.model_copy(update={"adapters": ()}))
    assert np.abs(recorder.images["flux", 0] - bare).max() > 1e-2


def test_embeddings_go_with_clip_skip_and_the_syntax_of_weights(tiny_models: Path, files: Files) -> None:
    source = tiny_models / "sdxl"
    jobs = [
        a_job_with("skipped", "dog", prompt="a red <cat>", negative_prompt="rain", clip_skip=1),
        a_job_with("negative", "bad", prompt="a red hill", negative_prompt="rain, bad-hands-5"),
    ]
    for syntax in ("plain", "weights"):
        recorder = run(spec_with(source, files("sdxl"), prompt_syntax=syntax), jobs)
        for job in jobs:
            off = np.abs(recorder.images[job.id, 0] - plain_image(source, files("sdxl"), job)).max()
            assert off <= TOLERANCE, f"{job.id} in {syntax} syntax is off by {off}"


def test_words_with_weights_get_the_image_of_plain_compel(tiny_models: Path, files: Files) -> None:
    """Also behind 75 tokens, where the vectors of a word stay together."""
    source, filler = tiny_models / "sd", "red fox. " * 10
    texts = {"(<cat>:1.4) on a hill": "(<cat>)1.4 on a hill", f"{filler} <cat>": f"{filler} <cat>"}
    jobs = [a_job_with(f"job{at}", "dog", prompt=text, negative_prompt="fog") for at, text in enumerate(texts)]
    recorder = run(spec_with(source, files("sd"), prompt_syntax="weights"), jobs)
    for job in jobs:
        pipeline = plain_pipeline(source, files("sd"), job)
        compel = Compel(
            pipeline.tokenizer,
            pipeline.text_encoder,
            textual_inversion_manager=DiffusersTextualInversionManager(pipeline),
            truncate_long_prompts=False,
            split_long_text_mode=SplitLongTextMode.WORDS,
        )
        with torch.no_grad():
            both = [compel(texts[job.prompt]), compel("fog")]
            states = compel.pad_conditioning_tensors_to_same_length(both)
        call = arguments_for(pipeline, job, 0, InputImages())
        call |= {"prompt": None, "negative_prompt": None, "prompt_embeds": states[0]}
        with torch.no_grad():
            image = pipeline(**call, negative_prompt_embeds=states[1]).images[0].numpy()
        assert np.abs(recorder.images[job.id, 0] - image).max() <= TOLERANCE, job.id


def test_an_embedding_goes_with_a_lora_of_the_text_encoder(tiny_models: Path, files: Files, tmp_path: Path) -> None:
    source, job = tiny_models / "sd", a_job_with("both", "dog", "ink", prompt="a red <cat>")
    pipeline = plain_pipeline(source, files("sd"), job)
    file = lora.save(load_pipeline(source), tmp_path / "ink.safetensors", 3, ("unet", "text_encoder"))
    recorder = run(spec_with(source, files("sd"), adapter=(AdapterSpec(id="ink", source=str(file)),)), [job])
    pipeline.load_lora_weights(file)
    with torch.no_grad():
        (output,) = make_results(pipeline, arguments_for(pipeline, job, 0, InputImages()))
    assert np.abs(recorder.images["both", 0] - output.pixels).max() <= TOLERANCE


def test_memory_for_embeddings_is_bounded_and_nothing_of_them_stays(tiny_models: Path, files: Files) -> None:
    """Without memory for any, jobs keep theirs until they finish."""
    source, jobs = tiny_models / "sd", jobs_with_embeddings()
    harness = EngineHarness(spec_with(source, files("sd")), adapter_memory_bytes=1, fresh=("tiny",))
    recorder = harness.run(*jobs)
    for job in jobs:
        off = np.abs(recorder.images[job.id, 0] - plain_image(source, files("sd"), job)).max()
        assert off <= TOLERANCE, f"{job.id} is off by {off}"
    (model,) = harness.engine._models.loaded.values()
    assert model.adapters.attached == ()
    parts = model.adapters.modules["text_encoder"].module.modules()  # transformers has hooks of its own in its layers
    tables = [part for part in parts if isinstance(part, torch.nn.Embedding)]
    assert tables
    assert not any(table._forward_hooks or table._forward_pre_hooks for table in tables)


def test_reproducible_images_are_bit_identical_among_any_embeddings(tiny_models: Path, files: Files) -> None:
    spec = spec_with(tiny_models / "sd", files("sd"))
    exact = a_job_with("exact", "dog", prompt="a <cat>", negative_prompt="rain", reproducible=True)
    alone = run(spec, [exact]).images["exact", 0]
    others = [job.model_copy(update={"reproducible": True}) for job in jobs_with_embeddings()]
    assert np.array_equal(run_together(spec, *others, exact).images["exact", 0], alone)


def test_a_word_in_no_prompt_and_words_that_do_not_fit_are_warnings(tiny_models: Path, files: Files) -> None:
    jobs = [
        a_job_with("unused", "easy", prompt="a hill with EasyNegative", steps=1),
        a_job_with("used", "easy", prompt="a hill (easyneg)", steps=1),
        a_job_with("long", "bad", prompt="bad-hands-5 " * 20, steps=1),
    ]
    recorder = run(spec_with(tiny_models / "sd", files("sd")), jobs)
    warnings = {name: [one.message for one in ended.warnings] for name, ended in recorder.finished.items()}
    assert warnings["unused"] == ["adapters: the word of an embedding, 'EasyNeg', is in none of the prompts"]
    assert warnings["used"] == []
    (cut,) = warnings["long"]
    assert "which leave out: 'bad-hands-5" in cut or "bad-hands-5 bad-hands-5'" in cut


def test_an_embedding_that_does_not_fit_fails_its_own_job(tiny_models: Path, files: Files, tmp_path: Path) -> None:
    """The message names the file and the reason, and batch mates finish."""
    (good,) = files("sd")["dog"].vectors.values()
    width, junk = good.shape[1], tmp_path / "junk.safetensors"
    junk.write_bytes(b"not a safetensors file at all, whatever its name says")
    torch.save({"emb_params": good}, tmp_path / "pickle.pt")
    states = {
        "wide": ({"emb_params": torch.ones(2, width + 1)}, f"takes {width}"),
        "infinite": ({"emb_params": torch.full((1, width), torch.inf)}, "not finite"),
        "many": ({"emb_params": torch.ones(76, width)}, "at most 75"),
        "two": ({"emb_params": good, "other": good.clone()}, "one tensor"),
        "lora": ({"unet.x.lora_A.weight": torch.ones(1, 2)}, "holds no embedding"),
    }
    messages = {name: words for name, (_, words) in states.items()}
    messages |= {"junk": "junk.safetensors", "pickle": "no safetensors file", "xl": "text_encoder_2"}
    sources = {name: tmp_path / f"{name}.safetensors" for name in messages}
    for name, (state, _) in states.items():
        save_file(state, sources[name])
    sources |= {"pickle": tmp_path / "pickle.pt", "xl": files("sdxl")["dog"].file}
    specs = [AdapterSpec(id=name, source=str(source), token="word") for name, source in sources.items()]
    specs.append(AdapterSpec(id="undeclared", source=str(files("sd")["dog"].file)))
    messages["undeclared"] = "set the token"
    spec = spec_with(tiny_models / "sd", files("sd"), adapter=tuple(specs), max_batch=16)
    fine = a_job_with("fine", "dog", prompt="<cat>")
    recorder = EngineHarness(spec).run(fine, *(a_job_with(name, name, prompt="a word") for name in messages))
    assert recorder.finished["fine"].error is None
    for name, words in messages.items():
        error = recorder.finished[name].error
        assert isinstance(error, AdapterUnavailable), name
        assert words in error.message, f"{name}: {error.message}"
        assert error.param == "adapters"


@pytest.mark.parametrize(("family", "reason"), [("sd3", "lacks a loader"), ("chroma", "lacks CLIP text encoders")])
def test_a_model_without_a_loader_of_embeddings_says_so(
    family: str, reason: str, tiny_model: Callable[[str], Path], files: Files
) -> None:
    spec = spec_with(tiny_model(family), files("sd"), tasks=(Task.TEXT_TO_IMAGE,))
    recorder = EngineHarness(spec).run(a_job_with("refused", "dog", prompt="<cat>", steps=1))
    error = recorder.finished["refused"].error
    assert isinstance(error, AdapterUnavailable)
    assert f"takes no embeddings: it {reason}" in error.message
