"""LoRA adapters that differ from job to job in one fused forward."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.adapters import (
    PeftReference,
    adapters_of,
    assert_all_like_solo,
    denoiser,
    eight_jobs,
    load_pipeline,
    mixable,
    run_together,
    spec_with,
)
from harness.engine import DIFFUSERS_AND_NUMPY, TIMEOUT_S, EngineHarness, EventRecorder, a_job
from harness.waiting import wait_until
from parity.running import as_floats
from safetensors.torch import load_file, save_file
from tiny import lora

from shared.errors import AdapterUnavailable
from worker.engine.fusion.module_proxy import SharedMethod
from worker.engine.models import adapter_loader as adapters_module
from worker.engine.protocol import EngineEvent, JobProgress

pytestmark = [
    pytest.mark.filterwarnings(
        DIFFUSERS_AND_NUMPY, "ignore:Already found a `peft_config`", "ignore:.*number of unique parameters mappings"
    ),
    pytest.mark.usefixtures("shared_models"),
]

Files = Callable[[str], dict[str, Path]]

# What the files of each family change besides the denoiser.
TEXT_ENCODERS = {"sd": ("text_encoder",), "sdxl": ("text_encoder_2",), "sd3": ("text_encoder",), "flux": ()}


@pytest.fixture(scope="module")
def files(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Three files for each family: the first changes a text encoder too."""

    @cache
    def of(family: str) -> dict[str, Path]:
        pipeline, folder = load_pipeline(tiny_models / family), tmp_path_factory.mktemp(family)
        first = (denoiser(pipeline), *TEXT_ENCODERS[family])
        return {
            "ink": lora.save(pipeline, folder / "ink.safetensors", 1, first),
            "oil": lora.save(pipeline, folder / "oil.safetensors", 2, first[:1]),
            "neon": lora.save(pipeline, folder / "neon.safetensors", 3, first[:1], lora.attention),
        }

    return of


@pytest.fixture(scope="module")
def reference(tiny_models: Path, files: Files) -> Callable[[str], PeftReference]:
    return cache(lambda family: PeftReference(tiny_models / family, files(family)))


@pytest.fixture
def floats() -> Iterator[None]:
    with as_floats():
        yield


@pytest.mark.usefixtures("floats")
@pytest.mark.parametrize(
    "family", ["sd", "flux", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sdxl", "sd3"))]
)
def test_jobs_with_different_adapters_and_none_share_one_forward(
    family: str, tiny_models: Path, files: Files, reference: Callable[[str], PeftReference]
) -> None:
    """Eight jobs, three adapters in six combinations: each image equals that of diffusers and PEFT."""
    jobs = eight_jobs()
    recorder = run_together(spec_with(tiny_models / family, files(family)), *jobs)
    assert_all_like_solo(recorder, reference(family), jobs)
    assert recorder.rows == [8, 8, 7, 1]
    for job in (one for one in jobs if len(one.adapters) == 1):
        plain = reference(family).image(job.model_copy(update={"adapters": ()}))
        assert np.abs(recorder.images[job.id, 0] - plain).max() > 1e-2, job.id


def test_an_adapter_that_does_not_load_fails_its_own_job(tiny_models: Path, files: Files, tmp_path: Path) -> None:
    """Each failure has its own message, and the batch mates finish."""
    state = load_file(files("sd")["oil"])
    one = next(name for name in state if name.endswith("lora_A.weight"))
    torch.save(state, tmp_path / "pickle.bin")
    (tmp_path / "junk.safetensors").write_bytes(b"not a safetensors file at all, whatever its name says")
    save_file(state | {"unet.conv_in.dora_scale": torch.ones(1)}, tmp_path / "dora.safetensors")
    save_file(state | {one: state[one][:, :2].contiguous()}, tmp_path / "narrow.safetensors")
    save_file({name: state[name] for name in (one,)}, tmp_path / "half.safetensors")
    save_file({"unet.conv_in.weight": torch.ones(1)}, tmp_path / "whole.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in state.items()}, tmp_path / "foreign.safetensors")
    messages = {
        "missing": "holds no safetensors file",
        "pickle": "holds no safetensors file",
        "junk": "cannot be loaded",
        "dora": "the norms of unet.conv_in are 1, but its outputs 16",
        "narrow": "but the layer takes",
        "half": "lacks one half",
        "whole": "unet.conv_in.weight",
        "foreign": "it changes other, which the model does not have",
        "unlisted": "no adapter 'unlisted'",
        "flux": "which the model does not have",
    }
    bad = {name: tmp_path / f"{name}.safetensors" for name in messages if name not in ("flux", "pickle", "unlisted")}
    bad |= {"pickle": tmp_path / "pickle.bin", "flux": files("flux")["neon"]}
    spec = spec_with(tiny_models / "sd", files("sd") | bad, max_batch=16)
    jobs = [mixable(a_job(name, adapters=adapters_of(("oil", 1.0), (name, 0.5)))) for name in messages]
    good = [
        mixable(a_job("none", steps=9)),
        mixable(a_job("fine", adapters=adapters_of(("oil", 1.0)))),
    ]
    recorder = EngineHarness(spec).run(*good, *jobs)
    assert [recorder.finished[job.id].error for job in good] == [None, None]
    for name, words in messages.items():
        error = recorder.finished[name].error
        assert isinstance(error, AdapterUnavailable), name
        assert words in error.message, f"{name}: {error.message}"
        assert error.param == "adapters"


def test_adapters_load_while_forwards_run(tiny_models: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running job makes steps while the file of another job is read; then they share forwards."""
    go_on = threading.Event()
    real = adapters_module.read

    def slow(*args: Any) -> Any:
        assert go_on.wait(TIMEOUT_S)
        return real(*args)

    @dataclass
    class Gate(EventRecorder):
        """After five steps, lets the file be read and blocks the engine's thread until the adapter has arrived."""

        busy: bool = False

        def on_event(self, event: EngineEvent) -> None:
            super().on_event(event)
            if isinstance(event, JobProgress) and (event.claim_key, event.step) == ("running", 5):
                self.busy = harness.engine.status().activity.busy
                go_on.set()
                wait_until(lambda: not harness.engine._inbox.empty(), "the adapter has been read", TIMEOUT_S)

    monkeypatch.setattr(adapters_module, "read", slow)
    gate = Gate()
    harness = EngineHarness(spec_with(tiny_models / "sd", files("sd")), recorder=gate)
    recorder = harness.run(
        mixable(a_job("running", steps=12)),
        mixable(a_job("waiting", adapters=adapters_of(("oil", 1.0)))),
    )
    assert ("loading", "waiting") in recorder.log
    assert gate.busy
    joined = recorder.rows.index(2)  # a selection can come between the file and the join
    assert joined >= 5
    assert recorder.rows == [*[1] * joined, *[2] * 4, *[1] * (8 - joined)]
    ended = recorder.finished["waiting"]
    assert (ended.error, ended.batching.max_jobs) == (None, 2)
    assert ended.load_ms is not None


@pytest.mark.usefixtures("floats")
def test_memory_for_adapters_is_bounded_and_used_adapters_stay(
    tiny_models: Path, files: Files, reference: Callable[[str], PeftReference]
) -> None:
    """Without memory for any, jobs keep their adapters until they finish; unused adapters are unloaded."""
    jobs = eight_jobs()
    harness = EngineHarness(spec_with(tiny_models / "sd", files("sd")), adapter_memory_bytes=1, fresh=("tiny",))
    recorder = harness.run(*jobs)
    assert_all_like_solo(recorder, reference("sd"), jobs)
    (model,) = harness.engine._models.loaded.values()
    assert model.adapters.attached == ()
    assert not any(module._forward_hooks for module in model.adapters.modules["unet"].module.modules())


def test_reproducible_images_are_bit_identical_among_any_adapters(tiny_models: Path, files: Files) -> None:
    """With and without adapters, solo and among jobs with other adapters."""
    spec = spec_with(tiny_models / "sd", files("sd"))
    exact = [
        mixable(a_job("exact", reproducible=True, adapters=adapters_of(("ink", 0.8)))),
        mixable(a_job("exact-bare", reproducible=True)),
    ]
    expected = {job.id: run_together(spec, job).images[job.id, 0] for job in exact[:1]}
    expected |= {"exact-bare": EngineHarness(spec).run(exact[1]).images["exact-bare", 0]}
    rng = random.Random(5)
    rows = []
    for _ in range(2):
        others = [
            mixable(
                a_job(
                    f"other{at}",
                    reproducible=True,
                    steps=rng.randint(3, 6),
                    adapters=adapters_of(*rng.choice([(), (("oil", 1.0),), (("ink", 0.8),), (("neon", 2.0),)])),
                )
            )
            for at in range(rng.randint(1, 5))
        ]
        jobs = [*others, *exact]
        rng.shuffle(jobs)
        recorder = run_together(spec, *jobs)
        rows += recorder.rows
        for job in exact:
            assert np.array_equal(recorder.images[job.id, 0], expected[job.id]), job.id
    assert max(rows) == 2


@pytest.mark.usefixtures("floats")
def test_adapters_follow_their_rows_when_memory_runs_out(
    tiny_models: Path, files: Files, reference: Callable[[str], PeftReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is split is stacked again, and each part has its own adapters."""
    monkeypatch.setattr("worker.engine.engine.run_self_check", lambda _model, _device: None)
    real = SharedMethod.run

    def scarce(method: SharedMethod, *args: Any, **kwargs: Any) -> Any:
        if method.component == "unet" and method.bind(args, kwargs)["sample"].shape[0] > 2 * 4:
            raise torch.OutOfMemoryError("injected")
        return real(method, *args, **kwargs)

    jobs = eight_jobs()
    # Those that bring the adapters into memory are spared: how many of them meet is a matter of rng.
    run_short = partial(monkeypatch.setattr, SharedMethod, "run", scarce)
    recorder = run_together(spec_with(tiny_models / "sd", files("sd")), *jobs, before=run_short)
    assert_all_like_solo(recorder, reference("sd"), jobs)
    assert max(recorder.rows) == 4
