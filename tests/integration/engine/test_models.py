"""Models come into memory, leave it, and say what is the matter when they cannot."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from harness import jobs as factory
from harness.engine import DIFFUSERS_AND_NUMPY, SIDE, TIMEOUT_S, Room, a_job, a_spec
from harness.waiting import wait_until
from tiny import registry

from shared.config.models_file import Limits
from shared.errors import ModelUnavailable
from shared.job import InputRef, Task
from worker.engine.fusion.architectures import ARCHITECTURES, Argument, Kind, StackingRules
from worker.engine.pipelines import loading

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)


BUFFERS = 50_000  # what tiny models hold beside their weights


def test_a_model_above_the_budget_is_refused_with_what_to_do(tiny_models: Path) -> None:
    """It could never be loaded: its jobs are told at once, and other models are not pushed out for it."""
    large, small = a_spec(tiny_models / "sd3", model="large"), a_spec(tiny_models / "sd", model="small")
    room = Room(large, small, gpu_memory_bytes=loading.locate(large)[1] - 1)
    with room.started() as engine:
        room.seat(a_job("first", model="small"))
        room.recorder.wait_for(["first"])
        room.seat(a_job("refused", model="large"))
        room.recorder.wait_for(["refused"])
        assert engine.status().loaded_models == ("small",)
    error = room.recorder.ended["refused"].error
    assert isinstance(error, ModelUnavailable)
    assert "'large' does not fit" in error.message
    assert "FUSEQUEUE_GPU_MEMORY_BYTES" in error.message


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1.0), ("bfloat16", 0.5)])
def test_what_a_model_takes_is_known_before_it_is_loaded(dtype: str, share: float, tiny_models: Path) -> None:
    """From the heads of its files, at the precision it is loaded in; weights in another variant do not count."""
    _, nbytes = loading.locate(a_spec(tiny_models / "sd", dtype=dtype))
    loaded = loading.load(a_spec(tiny_models / "sd"), tiny_models / "sd", torch.device("cpu"))
    assert 0 <= share * loaded.nbytes - nbytes < BUFFERS


def test_a_missing_folder_fails_the_job_with_what_to_check(tmp_path: Path) -> None:
    """The message names the model and its source; the worker lives on."""
    room = Room(a_spec(tmp_path / "nowhere"))
    heard = room.run(a_job("lost"))
    error = heard.ended["lost"].error
    assert isinstance(error, ModelUnavailable)
    assert "'tiny'" in error.message
    assert "model_index.json" in error.message


def test_weights_in_pickles_are_not_loaded(tiny_models: Path, tmp_path: Path) -> None:
    """Only safetensors: a pickle could run code."""
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_models / "sd", folder)
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save({}, folder / "unet" / "diffusion_pytorch_model.bin")
    weights.unlink()
    error = Room(a_spec(folder)).run(a_job("unsafe")).ended["unsafe"].error
    assert isinstance(error, ModelUnavailable)


def test_weights_that_do_not_fit_their_configuration_are_told(tiny_models: Path, tmp_path: Path) -> None:
    """A wrong width in a config file is an error of the model, not of the job's prompt."""
    folder = tmp_path / "misfit"
    shutil.copytree(tiny_models / "sd", folder)
    config = folder / "unet" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"cross_attention_dim": 48}))
    error = Room(a_spec(folder)).run(a_job("wrong")).ended["wrong"].error
    assert isinstance(error, ModelUnavailable)
    assert "'tiny'" in error.message


def test_a_model_that_was_repaired_loads_at_the_next_job(tiny_models: Path, tmp_path: Path) -> None:
    """A failed load is not remembered: the next job tries again."""
    folder = tmp_path / "late"
    room = Room(a_spec(folder))
    room.seat(a_job("early"))
    with room.started():
        room.recorder.wait_for(["early"])
        shutil.copytree(tiny_models / "sd", folder)
        room.seat(a_job("later"))
        room.recorder.wait_for(["later"])
    assert room.recorder.ended["early"].error is not None
    assert room.recorder.ended["later"].error is None


def test_the_least_recently_used_model_makes_room(tiny_models: Path) -> None:
    """Within the budget models stay; what does not fit pushes out the one that was idle longest."""
    specs = [a_spec(tiny_models / family, model=family) for family in ("sd", "sdxl", "sd3")]
    sizes = {spec.id: loading.locate(spec)[1] for spec in specs}
    budget = sizes["sd"] + sizes["sd3"] + BUFFERS
    room = Room(*specs, gpu_memory_bytes=budget)
    with room.started() as engine:
        for at, model in enumerate(["sd", "sdxl", "sd", "sd3"]):
            room.seat(a_job(f"job{at}", model=model))
            room.recorder.wait_for([f"job{at}"])
        assert set(engine.status().loaded_models) == {"sd", "sd3"}
    assert [entry for entry in room.recorder.heard if entry[0] == "loading"] == [
        ("loading", "job0"),
        ("loading", "job1"),
        ("loading", "job3"),
    ]


def test_a_model_that_leaves_is_gone_though_it_was_set_apart_from_garbage(tiny_models: Path) -> None:
    """What a warm engine holds is kept out of garbage collection; a model pushed out of it frees its memory."""
    specs = [a_spec(tiny_models / family, model=family) for family in ("sd", "sd3")]
    room = Room(*specs, gpu_memory_bytes=max(loading.locate(spec)[1] for spec in specs) + BUFFERS)
    try:
        with room.started() as engine:
            room.seat(a_job("first", model="sd"))
            room.recorder.wait_for(["first"])
            weights = weakref.ref(engine._models.loaded["sd"].shared_methods[0].module)
            gc.freeze()
            room.seat(a_job("second", model="sd3"))
            room.recorder.wait_for(["second"])
            wait_until(lambda: weights() is None, "the weights are freed", TIMEOUT_S)
            assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_a_model_with_running_jobs_stays(tiny_models: Path) -> None:
    """A second model waits for room until the first one's jobs have ended, however small the budget."""
    specs = [a_spec(tiny_models / family, model=family) for family in ("sd", "sd3")]
    budget = max(loading.locate(spec)[1] for spec in specs) + BUFFERS
    room = Room(*specs, gpu_memory_bytes=budget)
    room.seat(a_job("first", model="sd", steps=12))
    with room.started() as engine:
        wait_until(lambda: room.recorder.rows, "the first job runs", TIMEOUT_S)
        room.seat(a_job("second", model="sd3"))
        room.recorder.wait_for(["first", "second"])
        assert engine.status().loaded_models == ("sd3",)
    assert [room.recorder.ended[key].error for key in ("first", "second")] == [None, None]
    order = [(facts.model, facts.rows) for facts in room.recorder.facts]
    assert order == [("sd", 1)] * 12 + [("sd3", 1)] * 4


def test_warm_up_loads_what_fits_and_pushes_nothing_out(tiny_models: Path, tmp_path: Path) -> None:
    """It returns when all is settled, also for a model that cannot be loaded."""
    specs = [
        a_spec(tiny_models / "sd", model="sd"),
        a_spec(tmp_path / "nowhere", model="missing"),
        a_spec(tiny_models / "sdxl", model="sdxl"),
    ]
    room = Room(*specs, gpu_memory_bytes=loading.locate(specs[0])[1] + BUFFERS)
    with room.started() as engine:
        engine.warm_up()
        assert engine.status().loaded_models == ("sd",)
        assert not engine.status().activity.busy


def without_rules(patch: pytest.MonkeyPatch, architecture: str) -> None:
    rest = {name: rules for name, rules in ARCHITECTURES.items() if name != architecture}
    patch.setattr("worker.engine.fusion.module_proxy.ARCHITECTURES", rest)


def test_an_architecture_without_a_rule_is_fused_by_inferred_ones(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the arguments of real calls look like is enough for a UNet; the self-check has seen that it holds."""
    ruled = Room(a_spec(tiny_models / "sd")).run(a_job("one"), a_job("two"))
    without_rules(monkeypatch, "UNet2DConditionModel")
    inferred = Room(a_spec(tiny_models / "sd")).run(a_job("one"), a_job("two"))
    assert inferred.rows == ruled.rows == [2] * 4
    for key in ("one", "two"):
        assert np.abs(inferred.pictures[key, 0].astype(int) - ruled.pictures[key, 0].astype(int)).max() <= 1


def test_an_architecture_whose_rows_see_each_other_runs_alone_and_says_so(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Correct all the same: one by one, with the reason on the job's record."""
    real = UNet2DConditionModel.forward

    def mixing(self: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        (output,) = real(self, sample, *args, **kwargs)
        return (output + sample.mean(),)

    monkeypatch.setattr(UNet2DConditionModel, "forward", mixing)
    without_rules(monkeypatch, "UNet2DConditionModel")
    together = Room(a_spec(tiny_models / "sd")).run(a_job("one"), a_job("two"))
    apart = Room(a_spec(tiny_models / "sd")).run(a_job("one"), a_job("two"), solo=("one", "two"))
    assert together.rows == [1] * 8
    for key in ("one", "two"):
        reason = together.ended[key].batching.solo_reason
        assert reason is not None
        assert "has no stacking rule, and with an inferred one failed its self-check" in reason
        assert np.array_equal(together.pictures[key, 0], apart.pictures[key, 0])


def test_a_rule_that_is_wrong_is_found_at_load(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the text of the first row given to all rows, the self-check sees the difference and refuses the rule."""
    wrong = dict(ARCHITECTURES["UNet2DConditionModel"]["forward"].arguments)
    wrong["encoder_hidden_states"] = Argument(Kind.SHARED)
    rules: dict[str, Any] = {**ARCHITECTURES, "UNet2DConditionModel": {"forward": StackingRules("sample", wrong)}}
    monkeypatch.setattr("worker.engine.fusion.module_proxy.ARCHITECTURES", rules)
    heard = Room(a_spec(tiny_models / "sd")).run(a_job("one"), a_job("two"))
    assert heard.rows == [1] * 8
    reason = heard.ended["one"].batching.solo_reason
    assert reason is not None
    assert "failed its self-check" in reason
    assert heard.ended["one"].error is None


def test_a_rule_that_is_wrong_in_values_only_is_found_too(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared added conditions raise nothing and give pictures that are a little wrong: just what must not pass."""
    wrong = dict(ARCHITECTURES["FluxTransformer2DModel"]["forward"].arguments)
    wrong["pooled_projections"] = Argument(Kind.SHARED)
    rules: dict[str, Any] = {
        **ARCHITECTURES,
        "FluxTransformer2DModel": {"forward": StackingRules("hidden_states", wrong)},
    }
    monkeypatch.setattr("worker.engine.fusion.module_proxy.ARCHITECTURES", rules)
    heard = Room(a_spec(tiny_models / "flux")).run(a_job("one"), a_job("two"))
    reason = heard.ended["one"].batching.solo_reason
    assert reason is not None
    assert "off by" in reason


def test_a_pipeline_that_fails_at_the_smallest_size_is_checked_at_its_usual_one(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the limits allow is not always what the code bears; that must not cost all jobs their company."""
    own_check = StableDiffusionPipeline.check_inputs

    def strict(self: Any, prompt: Any, height: int, *args: Any, **kwargs: Any) -> None:
        if height < SIDE:
            raise ValueError("too small")
        own_check(self, prompt, height, *args, **kwargs)

    monkeypatch.setattr(StableDiffusionPipeline, "check_inputs", strict)
    spec = a_spec(tiny_models / "sd", tasks=(Task.TEXT_TO_IMAGE,), limits=Limits(min_side=SIDE // 2))
    heard = Room(spec).run(a_job("one"), a_job("two"))
    assert heard.ended["one"].batching.max_jobs == 2


def test_a_model_of_videos_between_two_pictures_is_checked_with_both(tmp_path: Path) -> None:
    """It cannot do with less."""
    last = InputRef(id="in_2", key="k", content_type="image/png", bytes=1, width=SIDE, height=SIDE)
    limits = Limits(multiple_of=16, max_frames=9, frames_multiple=4)
    spec = a_spec(registry.save_tiny("wan-2.1-flf2v", tmp_path), tasks=(Task.IMAGE_TO_VIDEO,), limits=limits)
    jobs = [
        a_job(name, task=Task.IMAGE_TO_VIDEO, frames=5, fps=16, steps=2, last_image=last) for name in ("one", "two")
    ]
    heard = Room(spec).run(*jobs)
    assert heard.ended["one"].batching.max_jobs == 2
    assert heard.made["one", 0].pixels.shape == (5, SIDE, SIDE, 3)


def test_a_task_that_the_pipeline_has_no_form_for_is_told(tiny_models: Path) -> None:
    """A job for a task that the model's table does not list cannot come from the API, and is refused all the same."""
    spec = a_spec(tiny_models / "sd", tasks=(Task.TEXT_TO_IMAGE,))
    error = Room(spec).run(a_job("from-picture", strength=0.5)).ended["from-picture"].error
    assert isinstance(error, ModelUnavailable)
    assert "image_to_image" in error.message


def test_an_unknown_scheduler_in_the_models_file_is_told(tiny_models: Path) -> None:
    """The name is at fault, not the jobs."""
    heard = Room(a_spec(tiny_models / "sd", schedulers=("NoSuchScheduler",))).run(a_job("one"))
    error = heard.ended["one"].error
    assert isinstance(error, ModelUnavailable)
    assert "NoSuchScheduler" in error.message


def test_half_precision_runs_fused(tiny_models: Path) -> None:
    """bfloat16 weights, and XL's VAE kept in float32, as its pipeline would have it."""
    heard = Room(a_spec(tiny_models / "sdxl", dtype="bfloat16")).run(
        a_job("one"), a_job("two"), a_job("three", strength=0.6)
    )
    assert [heard.ended[key].error for key in ("one", "two", "three")] == [None] * 3
    assert max(heard.rows) == 3


@pytest.mark.parametrize("wanted", [True, False])
def test_the_pipelines_own_safety_checker_flags_unless_it_is_switched_off(wanted: bool, tmp_path: Path) -> None:
    """A flagged picture is black, as its pipeline makes it, and is told as flagged; its job succeeds."""
    factory.save("sd", tmp_path / "checked", checked=True)
    heard = Room(a_spec(tmp_path / "checked", safety_checker=wanted)).run(a_job("one"), a_job("two"))
    assert heard.ended["one"].error is None
    assert [entry[3] for entry in heard.heard if entry[0] == "picture"] == [wanted, wanted]
    assert bool(heard.pictures["one", 0].any()) is not wanted


def test_a_model_that_is_image_to_image_by_itself_makes_pictures_from_text_too(
    tiny_models: Path, tmp_path: Path
) -> None:
    """The class in a model's index is only the first of the forms that its modules can take."""
    folder = tmp_path / "other-form"
    shutil.copytree(tiny_models / "sd", folder)
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": "StableDiffusionImg2ImgPipeline"}))
    heard = Room(a_spec(folder)).run(a_job("text"), a_job("picture", strength=0.5))
    assert [heard.ended[key].error for key in ("text", "picture")] == [None, None]
    assert heard.ended["text"].batching.max_jobs == 2


def test_a_pictures_own_code_is_a_sign_of_life(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pipelines compute long before the first forward: one after the other, that must not look like a hang."""
    room, seen = Room(a_spec(tiny_models / "sd")), []
    real = loading.arguments_for

    def watched(*args: Any) -> dict[str, Any]:
        seen.append((room.engine.status().activity.since_s, len(room.recorder.facts)))
        return real(*args)

    monkeypatch.setattr(loading, "arguments_for", watched)
    monkeypatch.setattr("worker.engine.engine.run_self_check", lambda *_: None)
    room.run(a_job("one"), a_job("two"), a_job("three"))
    (one, _), (two, _), (three, forwards) = seen
    assert one < two < three
    assert forwards == 0
