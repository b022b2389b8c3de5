"""Long and weighted prompts get the images of plain compel and plain diffusers, in batches with any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compel import Compel, EmbeddingsProvider, ReturnedEmbeddingsType, SplitLongTextMode
from harness.adapters import load_pipeline
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder, a_job, a_spec, input_files
from parity.running import ALIKE, TOLERANCE, as_floats
from tiny import controls, lora
from transformers import CLIPTextModel

from shared.config.adapters import Adapter, AdapterSpec
from shared.config.controls import Control, ControlSpec
from shared.config.model_spec import ModelSpec
from shared.errors import ModelUnavailable
from shared.job import Job
from shared.tasks import Task
from worker.engine.pipelines.call_arguments import arguments_for
from worker.engine.pipelines.control_nets import control_pipeline_class
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.pipelines.loading import load, locate
from worker.engine.pipelines.task_pipelines import pipeline_for

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

TASKS = (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT)
TEXTS = ("prompt", "negative_prompt", "prompt_2")
LONG = "a dog, " * 30  # 150 tokens of a letter each: two chunks
LONGER = "red fox. " * 40  # 280 tokens: four
# What jobs say; the same in compel's syntax for each part between BREAKs; and the words of the first 75 tokens.
PROMPTS = {
    "a dog on a hill": (["a dog on a hill"], "a dog on a hill"),
    "a (dog:1.4) on ((a hill))": (["a (dog)1.4 on (a hill)1.21"], "a dog on a hill"),
    LONG: ([LONG], "a dog, " * 15),
    f"{LONG} by (a river:1.5), {LONG}": ([f"{LONG} by (a river)1.5, {LONG}"], "a dog, " * 15),
    LONGER: ([LONGER], "red fox. " * 10 + "red"),
    "a cat BREAK the (moon:1.3)": (["a cat", "the (moon)1.3"], "a cat"),
    r"rain \(wet\)": ([r"rain \(wet\)"], "rain (wet)"),
    "": ([""], ""),
}
WORDS = {  # of the others the whole text, for T5
    "a (dog:1.4) on ((a hill))": "a dog on a hill",
    f"{LONG} by (a river:1.5), {LONG}": f"{LONG} by a river, {LONG}",
    "a cat BREAK the (moon:1.3)": "a cat the moon",
    r"rain \(wet\)": "rain (wet)",
}


@pytest.fixture(autouse=True)
def floats() -> Iterator[None]:
    with as_floats():
        yield


def weighted_spec(source: Path, **fields: Any) -> ModelSpec:
    return a_spec(source, **{"prompt_syntax": "weights", "tasks": TASKS, "max_batch": 16} | fields)


def run(spec: ModelSpec, jobs: Sequence[Job]) -> EventRecorder:
    recorder = EngineHarness(spec).run(*jobs)
    assert not {name: ended.error.message for name, ended in recorder.finished.items() if ended.error}
    return recorder


@cache
def loaded(source: Path) -> Any:
    return load_pipeline(source)


def by_compel(pipeline: Any, prompt: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the embeddings of a prompt, and of an empty one, of each text encoder."""
    is_xl = hasattr(pipeline, "text_encoder_2")  # or SD3
    layer = "PENULTIMATE_HIDDEN_STATES_NON_NORMALIZED" if is_xl else "LAST_HIDDEN_STATES_NORMALIZED"
    states, empty = [], []
    for number in ("", "_2") if is_xl else ("",):
        compel = Compel(
            getattr(pipeline, f"tokenizer{number}"),
            getattr(pipeline, f"text_encoder{number}"),
            truncate_long_prompts=False,
            returned_embeddings_type=ReturnedEmbeddingsType[layer],
            split_long_text_mode=SplitLongTextMode.WORDS,
        )
        states.append(torch.cat([compel(part) for part in PROMPTS[prompt][0]], dim=1))
        empty.append(compel(""))
    return states, empty


def pooled(pipeline: Any, prompt: str) -> torch.Tensor:
    """Return what the second encoder, for SD3 both, says of the first chunk, which has no weights there."""
    outputs = []
    for number in ("", "_2") if hasattr(pipeline, "text_encoder_3") else ("_2",):
        tokenizer = getattr(pipeline, f"tokenizer{number}")
        ids = tokenizer(PROMPTS[prompt][1], padding="max_length", max_length=77, return_tensors="pt").input_ids
        assert ids.shape == (1, 77)
        outputs.append(getattr(pipeline, f"text_encoder{number}")(ids)[0])
    return torch.cat(outputs, dim=-1)


def of_t5(pipeline: Any, prompt: str) -> torch.Tensor:
    read = {"padding": "max_length", "max_length": 256, "truncation": True, "return_tensors": "pt"}
    return pipeline.text_encoder_3(pipeline.tokenizer_3(WORDS.get(prompt, prompt), **read).input_ids)[0]


@torch.no_grad()
def embeddings(pipeline: Any, job: Job) -> dict[str, torch.Tensor]:
    zeros = job.negative_prompt is None and pipeline.config.get("force_zeros_for_empty_prompt")
    texts = {"": job.prompt} | ({} if zeros or job.guidance_scale <= 1 else {"negative_": job.negative_prompt or ""})
    made = {prefix: by_compel(pipeline, text) for prefix, text in texts.items()}
    tokens = max(one.shape[1] for states, _ in made.values() for one in states)
    values = {}
    for prefix, (states, empty) in made.items():
        padded = [
            torch.cat([one, *[blank] * ((tokens - one.shape[1]) // 77)], dim=1)
            for one, blank in zip(states, empty, strict=True)
        ]
        of_clip = torch.cat(padded, dim=-1)
        if hasattr(pipeline, "text_encoder_3"):
            last = of_t5(pipeline, texts[prefix])
            of_clip = torch.cat(
                [torch.nn.functional.pad(of_clip, (0, last.shape[-1] - of_clip.shape[-1])), last], dim=1
            )
        values[f"{prefix}prompt_embeds"] = of_clip
        if len(states) > 1:
            values[f"{prefix}pooled_prompt_embeds"] = pooled(pipeline, texts[prefix])
    return values


def plain_image(source: Path, job: Job) -> np.ndarray:
    """Return the image of compel's embeddings and diffusers' pipeline."""
    pipeline: Any = pipeline_for(job.task, loaded(source))
    if job.controls:
        net = control_net(source)
        pipeline = control_pipeline_class(pipeline, net).from_pipe(pipeline, controlnet=net)
    pipeline.set_progress_bar_config(disable=True)
    call = arguments_for(pipeline, job, 0, decode_inputs(job, input_files(job)))
    call = {name: value for name, value in call.items() if name not in TEXTS} | embeddings(pipeline, job)
    torch.manual_seed(job.seed)
    with torch.no_grad():
        return np.asarray(pipeline(**call).images[0].float().cpu().numpy())


@cache
def control_net(source: Path) -> Any:
    from diffusers import ControlNetModel

    return ControlNetModel.from_pretrained(Path(f"{source}-edges"))


def compare(recorder: EventRecorder, source: Path, jobs: Sequence[Job]) -> None:
    images = {job.id: plain_image(source, job) for job in jobs}
    off = {name: float(np.abs(recorder.images[name, 0] - image).max()) for name, image in images.items()}
    assert max(off.values()) <= TOLERANCE, off
    same = [
        (name, other)
        for at, (name, image) in enumerate(images.items())
        for other in list(images)[:at]
        if np.abs(image - images[other]).max() < ALIKE
    ]
    assert not same, f"images that are alike prove nothing: {same}"


def jobs_of_all_kinds() -> list[Job]:
    plain, weighted, long, long_weighted, longer, broken, negative, _ = PROMPTS
    return [
        a_job("plain", prompt=plain),
        a_job("weighted", prompt=weighted),
        a_job("long", prompt=long),
        a_job("long-weighted", prompt=long_weighted, guidance_scale=6.0),
        a_job("breaks", prompt=broken, steps=3),
        a_job("long-negative", prompt=plain, negative_prompt=longer),
        a_job("both", prompt=longer, negative_prompt=negative),
        a_job("unguided", prompt=long, guidance_scale=1.0),
        a_job("from-image", prompt=long, strength=0.6, steps=6),
        a_job("inpainted", prompt=weighted, negative_prompt=long, task=Task.INPAINT, strength=0.8, steps=5),
    ]


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3-16"])
def test_each_job_gets_the_image_of_plain_compel(family: str, tiny_model: Callable[[str], Path]) -> None:
    """Of SD3, whose T5 reads the words without weights, which a warning says."""
    source, jobs = tiny_model(family), jobs_of_all_kinds()
    recorder = run(weighted_spec(source), jobs)
    compare(recorder, source, jobs)
    weighted = {"weighted": ["prompt"], "long-weighted": ["prompt"], "breaks": ["prompt"], "inpainted": ["prompt"]}
    warnings = {job.id: [one.param for one in recorder.finished[job.id].warnings] for job in jobs}
    assert warnings == {job.id: weighted.get(job.id, []) if family == "sd3-16" else [] for job in jobs}
    words = [one.message for ended in recorder.finished.values() for one in ended.warnings]
    assert all("T5 reads the words without them" in message for message in words)
    assert all(recorder.finished[job.id].batching.max_jobs > 1 for job in jobs[:3])


def test_weights_below_one_draw_the_states_towards_those_of_no_prompt(tiny_model: Callable[[str], Path]) -> None:
    """By any factor: compel's own syntax has another meaning for these."""
    source, pipeline = tiny_model("sd"), loaded(tiny_model("sd"))
    weights = {"half": 0.5, "none": 0.0, "against": -1.0, "slightly": 1 / 1.1}
    jobs = [a_job(name, prompt=f"a (dog:{weight}) on a hill", seed=1) for name, weight in weights.items()]
    jobs.append(a_job("brackets", prompt="a [dog] on a hill", seed=2))
    recorder = run(weighted_spec(source), jobs)
    with torch.no_grad():
        full, empty = (
            pipeline.text_encoder(
                pipeline.tokenizer(text, padding="max_length", max_length=77, return_tensors="pt").input_ids
            )[0]
            for text in ("a dog on a hill", "")
        )
        for job, weight in zip(jobs, [*weights.values(), 1 / 1.1], strict=True):
            factors = torch.ones(77, 1)
            factors[2:5] = weight  # after the mark of the start, and "a"
            call = arguments_for(pipeline, job, 0, decode_inputs(job, input_files(job)))
            call |= {"prompt": None, "prompt_embeds": empty + (full - empty) * factors}
            image = pipeline(**call).images[0].float().cpu().numpy()
            assert np.abs(recorder.images[job.id, 0] - image).max() <= TOLERANCE, job.id


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3"])
def test_a_short_prompt_without_weights_gets_the_same_image_as_in_plain_syntax(
    family: str, tiny_model: Callable[[str], Path]
) -> None:
    jobs = [
        a_job("plain", prompt="a dog"),
        a_job("negative", prompt="a dog", negative_prompt="rain"),
        a_job("blank", prompt="a dog", negative_prompt=""),
        a_job("skipped", prompt="a dog", negative_prompt="rain", clip_skip=1),
        a_job("second", prompt="a dog", prompt_2="a cat"),
    ]
    source = tiny_model(family)
    weighted, plain = (run(weighted_spec(source, prompt_syntax=syntax), jobs) for syntax in ("weights", "plain"))
    off = {key: float(np.abs(image - plain.images[key]).max()) for key, image in weighted.images.items()}
    assert max(off.values()) <= 1e-5, off  # rounding, in forwards of other numbers of rows
    assert weighted.rows == plain.rows, "all share forwards"


def test_equal_chunks_are_encoded_once(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all jobs, and the chunks of different jobs together."""
    forward, rows = CLIPTextModel.forward, list[int]()

    def counted(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(input_ids.shape[0])
        return forward(self, input_ids, *args, **kwargs)

    harness = EngineHarness(weighted_spec(tiny_model("sd")))
    with harness.started() as engine:
        engine.warm_up()
        monkeypatch.setattr(CLIPTextModel, "forward", counted)
        jobs = [a_job(f"job{at}", prompt=LONG, n=2, seed=at) for at in range(3)]
        other = a_job("other", prompt="a hill BREAK a mill")
        harness.submit(*jobs, other)
        harness.recorder.wait_for([*(job.id for job in jobs), "other"])
    assert sum(rows) <= 5, "two chunks of three jobs, two of another, and an empty one"
    assert max(rows) == 2


def test_adapters_and_control_images_go_with_long_prompts(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_model("sd")
    pipeline = load_pipeline(source)
    file = lora.save(pipeline, tmp_path / "ink.safetensors", 3, ("unet", "text_encoder"))
    controls.save(source, Path(f"{source}-edges"), 0)
    spec = weighted_spec(
        source,
        adapter=(AdapterSpec(id="ink", source=str(file)),),
        control=(ControlSpec(id="edges", source=f"{source}-edges"),),
    )
    weighted, long = list(PROMPTS)[1:3]
    plain = [
        a_job("long", prompt=long, negative_prompt=weighted),
        a_job("controlled", prompt=long, controls=(Control(id="edges"),)),
        a_job(
            "controlled-from-image",
            prompt=weighted,
            negative_prompt=long,
            controls=(Control(id="edges"),),
            strength=0.7,
        ),
    ]
    adapted = a_job("adapted", prompt=long, negative_prompt=weighted, adapters=(Adapter(id="ink", scale=1.0),))
    recorder = run(spec, [*plain, adapted])
    compare(recorder, source, plain)
    pipeline.load_lora_weights(file)
    call = arguments_for(pipeline, adapted, 0, decode_inputs(adapted, input_files(adapted)))
    call = {name: value for name, value in call.items() if name not in TEXTS} | embeddings(pipeline, adapted)
    image = pipeline(**call).images[0].float().cpu().numpy()
    assert np.abs(recorder.images["adapted", 0] - image).max() <= TOLERANCE
    assert np.abs(recorder.images["long", 0] - recorder.images["adapted", 0]).max() > ALIKE


ODD = [
    "BREAK",
    "BREAK BREAK (BREAK)",
    "(((((",
    ")]:1.3)",
    "(a:nan) (b:inf) (c:1e999)",
    "(a:99999999999) [b] (c:-99999999999)",
    "()[](:1.2)",
    "<|endoftext|> (<|startoftext|>:1.3)",
    "\x00\ud7ff\u202e (\u200b:0.5)",
    "\\",
    "x" * 400,
]
HUGE = ["(a" * 10_000, "(a:0.5) " * 2500, "a BREAK " * 2500, "\N{GRINNING FACE}" * 20_000, ": " * 10_000, "[a b" * 5000]


def test_any_prompt_makes_an_image_and_a_warning_quotes_what_is_left_out(tiny_model: Callable[[str], Path]) -> None:
    texts = [*ODD, *HUGE]
    jobs = [a_job(f"odd{at}", prompt=text, steps=1) for at, text in enumerate(texts)]
    jobs += [a_job(f"negative{at}", prompt="a", negative_prompt=text, steps=1) for at, text in enumerate(HUGE)]
    recorder = run(weighted_spec(tiny_model("sd")), jobs)
    assert all(np.isfinite(image).all() for image in recorder.images.values())
    cut = {name: [one.param for one in ended.warnings] for name, ended in recorder.finished.items()}
    long = {f"odd{at}": ["prompt"] for at, text in enumerate(texts) if text in HUGE}
    assert cut == {job.id: [] for job in jobs} | long | {
        f"negative{at}": ["negative_prompt"] for at in range(len(HUGE))
    }
    assert all(len(one.message) < 400 for ended in recorder.finished.values() for one in ended.warnings)


def test_of_a_huge_prompt_only_what_is_read_or_shown_is_tokenized(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 25,000 weighted fragments would hold up all jobs of the engine for seconds."""
    tokenized: list[int] = []
    get_token_ids = EmbeddingsProvider.get_token_ids

    def counted(self: Any, texts: list[str], **options: Any) -> Any:
        tokenized.append(len(texts))
        return get_token_ids(self, texts, **options)

    monkeypatch.setattr(EmbeddingsProvider, "get_token_ids", counted)
    recorder = run(weighted_spec(tiny_model("sd")), [a_job("huge", prompt="(a)b" * 12_500, steps=1)])
    (warning,) = recorder.finished["huge"].warnings
    assert "longer than 16 chunks" in warning.message
    assert 16 * 75 < sum(tokenized) < 2 * 24 * 75


def test_a_model_with_other_text_encoders_is_not_loaded(tiny_model: Callable[[str], Path]) -> None:
    spec = weighted_spec(tiny_model("flux"), tasks=(Task.TEXT_TO_IMAGE,))
    folder, _ = locate(spec)
    with pytest.raises(ModelUnavailable, match=r"prompt_syntax.*its text encoders are not CLIP only; remove the key"):
        load(spec, folder, torch.device("cpu"))
