"""Loading and evicting models, and the errors of models that cannot be loaded."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from harness import jobs as factory
from harness.engine import DIFFUSERS_AND_NUMPY, SIDE, TIMEOUT_S, EngineHarness, a_job, a_spec
from harness.waiting import wait_until

from shared.architectures.registry import ARCHITECTURES
from shared.architectures.stacking_rules import Argument, Kind, StackingRules
from shared.config.request_limits import Limits
from shared.errors import ModelUnavailable
from shared.job import InputRef
from shared.tasks import Task
from worker.engine.pipelines import loaded_model, loading

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)


BUFFERS = 50_000  # bytes of a tiny model in addition to its weights


@pytest.mark.usefixtures("quick_loads")
def test_a_model_above_the_budget_is_refused_with_a_remedy(tiny_models: Path) -> None:
    """It can never be loaded: its jobs fail at once, and no other model is evicted for it."""
    large, small = a_spec(tiny_models / "sd3", model="large"), a_spec(tiny_models / "sd", model="small")
    harness = EngineHarness(large, small, gpu_memory_bytes=loading.locate(large)[1] - 1)
    with harness.started() as engine:
        harness.submit(a_job("first", model="small"))
        harness.recorder.wait_for(["first"])
        harness.submit(a_job("refused", model="large"))
        harness.recorder.wait_for(["refused"])
        assert engine.status().loaded_models == ("small",)
    error = harness.recorder.finished["refused"].error
    assert isinstance(error, ModelUnavailable)
    assert "'large' does not fit" in error.message
    assert "FUSEQUEUE_GPU_MEMORY_BYTES" in error.message


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1.0), ("bfloat16", 0.5)])
def test_the_size_of_a_model_is_known_before_it_is_loaded(dtype: str, share: float, tiny_models: Path) -> None:
    """From the headers of its files, at the dtype of the load; weights of another variant do not count."""
    _, nbytes = loading.locate(a_spec(tiny_models / "sd", dtype=dtype))
    loaded = loading.load(a_spec(tiny_models / "sd"), tiny_models / "sd", torch.device("cpu"))
    assert 0 <= share * loaded.nbytes - nbytes < BUFFERS


@pytest.mark.parametrize(
    ("dtype", "of_vae"), [("float16", torch.float32), ("bfloat16", torch.bfloat16), ("float32", torch.float32)]
)
def test_the_vae_of_xl_has_the_dtype_in_which_the_pipeline_decodes(
    dtype: str, of_vae: torch.dtype, tiny_models: Path
) -> None:
    """The pipeline casts a VAE with `force_upcast` to float32 only from float16, whose range is too small for it."""
    spec = a_spec(tiny_models / "sdxl", dtype=dtype)
    loaded = loading.load(spec, tiny_models / "sdxl", torch.device("cpu"))
    (decode,) = (method for method in loaded.shared_methods if method.name == "vae.decode")
    assert {weight.dtype for weight in decode.module.parameters()} == {of_vae}


def test_a_model_in_bfloat16_encodes_images_for_a_vae_that_its_pipeline_casts(tiny_models: Path) -> None:
    recorder = EngineHarness(a_spec(tiny_models / "sdxl", dtype="bfloat16")).run(a_job("again", strength=0.5))
    assert recorder.finished["again"].error is None
    assert recorder.images["again", 0].std() > 0


@pytest.mark.usefixtures("quick_loads")
def test_an_engine_computes_in_full_float32(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch lets a GPU's convolutions use TensorFloat-32 by default, by which rows differ from solo runs."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    EngineHarness(a_spec(tiny_models / "sd")).run(a_job("one", steps=1))
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_missing_folder_fails_the_job_with_a_remedy(tmp_path: Path) -> None:
    """The message names the model and its source. Other folders beside it show that the file system is there."""
    (tmp_path / "other").mkdir()
    harness = EngineHarness(a_spec(tmp_path / "nowhere"))
    recorder = harness.run(a_job("lost"))
    error = recorder.finished["lost"].error
    assert isinstance(error, ModelUnavailable)
    assert "'tiny'" in error.message
    assert "model_index.json" in error.message


def test_weights_in_pickles_are_not_loaded(tiny_models: Path, tmp_path: Path) -> None:
    """Only safetensors files are, because a pickle can run code."""
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_models / "sd", folder)
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save({}, folder / "unet" / "diffusion_pytorch_model.bin")
    weights.unlink()
    error = EngineHarness(a_spec(folder)).run(a_job("unsafe")).finished["unsafe"].error
    assert isinstance(error, ModelUnavailable)


def test_weights_that_do_not_match_their_configuration_fail_the_load(tiny_models: Path, tmp_path: Path) -> None:
    """A wrong width in a config file is an error of the model, not of the job's prompt."""
    folder = tmp_path / "misfit"
    shutil.copytree(tiny_models / "sd", folder)
    config = folder / "unet" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"cross_attention_dim": 48}))
    error = EngineHarness(a_spec(folder)).run(a_job("wrong")).finished["wrong"].error
    assert isinstance(error, ModelUnavailable)
    assert "'tiny'" in error.message


@pytest.mark.usefixtures("quick_loads")
def test_a_repaired_model_loads_for_the_next_job(tiny_models: Path, tmp_path: Path) -> None:
    """The next job repeats a failed load."""
    folder = tmp_path / "late"
    (tmp_path / "other").mkdir()
    harness = EngineHarness(a_spec(folder))
    harness.submit(a_job("early"))
    with harness.started():
        harness.recorder.wait_for(["early"])
        shutil.copytree(tiny_models / "sd", folder)
        harness.submit(a_job("later"))
        harness.recorder.wait_for(["later"])
    assert harness.recorder.finished["early"].error is not None
    assert harness.recorder.finished["later"].error is None


@pytest.mark.usefixtures("quick_loads")
def test_the_least_recently_used_model_is_evicted(tiny_models: Path) -> None:
    """Models within the budget stay loaded."""
    specs = [a_spec(tiny_models / family, model=family) for family in ("sd", "sdxl", "sd3")]
    sizes = {spec.id: loading.locate(spec)[1] for spec in specs}
    budget = sizes["sd"] + sizes["sd3"] + BUFFERS
    harness = EngineHarness(*specs, gpu_memory_bytes=budget)
    with harness.started() as engine:
        for at, model in enumerate(["sd", "sdxl", "sd", "sd3"]):
            harness.submit(a_job(f"job{at}", model=model))
            harness.recorder.wait_for([f"job{at}"])
        assert set(engine.status().loaded_models) == {"sd", "sd3"}
    assert [entry for entry in harness.recorder.log if entry[0] == "loading"] == [
        ("loading", "job0"),
        ("loading", "job1"),
        ("loading", "job3"),
    ]


def test_an_evicted_model_is_freed_although_garbage_collection_skips_it(tiny_models: Path) -> None:
    """After the warm-up `gc.freeze` excludes models from garbage collection."""
    specs = [a_spec(tiny_models / family, model=family) for family in ("sd", "sd3")]
    harness = EngineHarness(*specs, gpu_memory_bytes=max(loading.locate(spec)[1] for spec in specs) + BUFFERS)
    try:
        with harness.started() as engine:
            harness.submit(a_job("first", model="sd"))
            harness.recorder.wait_for(["first"])
            weights = weakref.ref(engine._models.loaded["sd"].shared_methods[0].module)
            gc.freeze()
            harness.submit(a_job("second", model="sd3"))
            harness.recorder.wait_for(["second"])
            wait_until(lambda: weights() is None, "the weights are freed", TIMEOUT_S)
            assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # else each collection in later tests walks through all that is imported


@pytest.mark.usefixtures("quick_loads")
def test_a_model_with_running_jobs_stays(tiny_models: Path) -> None:
    """A second model waits until the first one's jobs have finished."""
    specs = [a_spec(tiny_models / family, model=family) for family in ("sd", "sd3")]
    budget = max(loading.locate(spec)[1] for spec in specs) + BUFFERS
    harness = EngineHarness(*specs, gpu_memory_bytes=budget)
    harness.submit(a_job("first", model="sd", steps=12))
    with harness.started() as engine:
        wait_until(lambda: harness.recorder.rows, "the first job runs", TIMEOUT_S)
        harness.submit(a_job("second", model="sd3"))
        harness.recorder.wait_for(["first", "second"])
        assert engine.status().loaded_models == ("sd3",)
    assert [harness.recorder.finished[key].error for key in ("first", "second")] == [None, None]
    order = [(forward.model, forward.rows) for forward in harness.recorder.forwards]
    assert order == [("sd", 1)] * 12 + [("sd3", 1)] * 4


@pytest.mark.usefixtures("quick_loads")
def test_warm_up_loads_models_that_fit_and_evicts_none(tiny_models: Path, tmp_path: Path) -> None:
    """It also returns for a model that cannot be loaded."""
    specs = [
        a_spec(tiny_models / "sd", model="sd"),
        a_spec(tmp_path / "nowhere", model="missing"),
        a_spec(tiny_models / "sdxl", model="sdxl"),
    ]
    harness = EngineHarness(*specs, gpu_memory_bytes=loading.locate(specs[0])[1] + BUFFERS)
    with harness.started() as engine:
        engine.warm_up()
        assert engine.status().loaded_models == ("sd",)
        assert not engine.status().activity.busy


def test_a_wrong_rule_is_detected_at_load(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that gives the first row's text to all rows fails the self-check."""
    wrong = dict(ARCHITECTURES["UNet2DConditionModel"]["forward"].arguments)
    wrong["encoder_hidden_states"] = Argument(Kind.SHARED)
    rules: dict[str, Any] = {**ARCHITECTURES, "UNet2DConditionModel": {"forward": StackingRules("sample", wrong)}}
    monkeypatch.setattr("worker.engine.fusion.module_proxy.ARCHITECTURES", rules)
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(a_job("one"), a_job("two"))
    assert recorder.rows == [1] * 8
    reason = recorder.finished["one"].batching.solo_reason
    assert reason is not None
    assert "failed its self-check" in reason
    assert recorder.finished["one"].error is None


def test_a_rule_with_wrong_values_is_detected(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared pooled projections raise no error, but the images are slightly wrong."""
    wrong = dict(ARCHITECTURES["FluxTransformer2DModel"]["forward"].arguments)
    wrong["pooled_projections"] = Argument(Kind.SHARED)
    rules: dict[str, Any] = {
        **ARCHITECTURES,
        "FluxTransformer2DModel": {"forward": StackingRules("hidden_states", wrong)},
    }
    monkeypatch.setattr("worker.engine.fusion.module_proxy.ARCHITECTURES", rules)
    recorder = EngineHarness(a_spec(tiny_models / "flux")).run(a_job("one"), a_job("two"))
    reason = recorder.finished["one"].batching.solo_reason
    assert reason is not None
    assert "off by" in reason


def test_a_pipeline_that_fails_at_the_smallest_size_is_checked_at_the_default_size(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest allowed size is not always supported by the pipeline."""
    original = StableDiffusionPipeline.check_inputs

    def strict(self: Any, prompt: Any, height: int, *args: Any, **kwargs: Any) -> None:
        if height < SIDE:
            raise ValueError("too small")
        original(self, prompt, height, *args, **kwargs)

    monkeypatch.setattr(StableDiffusionPipeline, "check_inputs", strict)
    spec = a_spec(tiny_models / "sd", tasks=(Task.TEXT_TO_IMAGE,), limits=Limits(min_side=SIDE // 2))
    recorder = EngineHarness(spec).run(a_job("one"), a_job("two"))
    assert recorder.finished["one"].batching.max_jobs == 2


def test_a_first_last_frame_video_model_is_checked_with_two_images(tiny_model: Callable[[str], Path]) -> None:
    """Its pipeline requires both."""
    last = InputRef(id="in_2", key="k", content_type="image/png", bytes=1, width=SIDE, height=SIDE)
    limits = Limits(multiple_of=16, max_frames=9, frames_multiple=4)
    spec = a_spec(tiny_model("wan-2.1-flf2v"), tasks=(Task.IMAGE_TO_VIDEO,), limits=limits)
    jobs = [
        a_job(name, task=Task.IMAGE_TO_VIDEO, frames=5, fps=16, steps=2, last_image=last) for name in ("one", "two")
    ]
    recorder = EngineHarness(spec).run(*jobs)
    assert recorder.finished["one"].batching.max_jobs == 2
    assert recorder.outputs["one", 0].pixels.shape == (5, SIDE, SIDE, 3)


@pytest.mark.usefixtures("shared_models")
def test_a_task_without_a_pipeline_fails_the_job(tiny_models: Path) -> None:
    """The API refuses such jobs; the engine does too."""
    spec = a_spec(tiny_models / "sd", tasks=(Task.TEXT_TO_IMAGE,))
    error = EngineHarness(spec).run(a_job("from-image", strength=0.5)).finished["from-image"].error
    assert isinstance(error, ModelUnavailable)
    assert "image_to_image" in error.message


def test_an_unknown_noise_scheduler_in_the_models_file_fails_only_its_jobs(tiny_models: Path) -> None:
    spec = a_spec(tiny_models / "sd", schedulers=("NoSuchScheduler",))
    recorder = EngineHarness(spec).run(a_job("one"), a_job("named", scheduler="NoSuchScheduler"))
    assert recorder.finished["one"].error is None
    error = recorder.finished["named"].error
    assert error is not None
    assert (error.param, "NoSuchScheduler" in error.message) == ("scheduler", True)


def test_half_precision_runs_fused(tiny_models: Path) -> None:
    """bfloat16 weights, with XL's VAE in float32 like its pipeline."""
    recorder = EngineHarness(a_spec(tiny_models / "sdxl", dtype="bfloat16")).run(
        a_job("one"), a_job("two"), a_job("three", strength=0.6)
    )
    assert [recorder.finished[key].error for key in ("one", "two", "three")] == [None] * 3
    assert max(recorder.rows) == 3


@pytest.mark.parametrize("wanted", [True, False])
def test_the_safety_checker_flags_images_unless_it_is_disabled(wanted: bool, tmp_path: Path) -> None:
    """A flagged image is black, like from the pipeline; its job succeeds."""
    factory.save("sd", tmp_path / "checked", checked=True)
    recorder = EngineHarness(a_spec(tmp_path / "checked", safety_checker=wanted)).run(a_job("one"), a_job("two"))
    assert recorder.finished["one"].error is None
    assert [entry[3] for entry in recorder.log if entry[0] == "output"] == [wanted, wanted]
    assert bool(recorder.images["one", 0].any()) is not wanted


def test_a_model_saved_as_image_to_image_also_runs_text_to_image(tiny_models: Path, tmp_path: Path) -> None:
    """The class in a model's index is only one of the pipelines that its modules support."""
    folder = tmp_path / "other-form"
    shutil.copytree(tiny_models / "sd", folder)
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": "StableDiffusionImg2ImgPipeline"}))
    recorder = EngineHarness(a_spec(folder)).run(a_job("text"), a_job("output", strength=0.5))
    assert [recorder.finished[key].error for key in ("text", "output")] == [None, None]
    assert recorder.finished["text"].batching.max_jobs == 2


def test_slow_code_of_a_pipeline_counts_as_progress(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pipelines compute for long before the first forward; that must not look like a hang."""
    harness, seen = EngineHarness(a_spec(tiny_models / "sd")), []
    real = loaded_model.arguments_for

    def record(*args: Any) -> dict[str, Any]:
        seen.append((harness.engine.status().activity.since_s, len(harness.recorder.forwards)))
        return real(*args)

    monkeypatch.setattr(loaded_model, "arguments_for", record)
    monkeypatch.setattr("worker.engine.engine.run_self_check", lambda *_: None)
    harness.run(a_job("one"), a_job("two"), a_job("three"))
    (one, _), (two, _), (three, forwards) = seen
    assert one < two < three
    assert forwards == 0


@pytest.mark.usefixtures("quick_loads")
def test_a_model_without_room_is_examined_for_missing_packages(tiny_models: Path, tmp_path: Path) -> None:
    """Its jobs would be the first to learn of them; one that lacks nothing is left to its jobs."""
    folder = tmp_path / "lacking"
    shutil.copytree(tiny_models / "sd", folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["feature_extractor"] = ["transformers", "Pop2PianoTokenizer"]
    (folder / "model_index.json").write_text(json.dumps(index))
    specs = [a_spec(tiny_models / "sd", model="first"), a_spec(folder, model="lacking")]
    specs.append(a_spec(tiny_models / "sd", model="second"))
    harness = EngineHarness(*specs, gpu_memory_bytes=loading.locate(specs[0])[1] + BUFFERS)
    with harness.started() as engine:
        engine.warm_up()
        status = engine.status()
        assert status.loaded_models == ("first",)
        assert [*status.unavailable_models] == ["lacking"]
        assert "it needs pretty_midi" in status.unavailable_models["lacking"].reason
        harness.submit(a_job("later", model="second"))
        harness.recorder.wait_for(["later"])
        assert harness.recorder.finished["later"].error is None
