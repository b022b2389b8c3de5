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
from harness.engine import DIFFUSERS_AND_NUMPY, TIMEOUT_S, Recorder, Room, a_job
from harness.waiting import wait_until
from parity.running import as_floats
from safetensors.torch import load_file, save_file
from tiny import lora

from shared.errors import AdapterUnavailable
from worker.engine import EngineEvent, JobProgress
from worker.engine.fusion.module_proxy import SharedMethod
from worker.engine.lora import adapter_loader as adapters_module

pytestmark = pytest.mark.filterwarnings(
    DIFFUSERS_AND_NUMPY, "ignore:Already found a `peft_config`", "ignore:.*number of unique parameters mappings"
)

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
def lone(tiny_models: Path, files: Files) -> Callable[[str], PeftReference]:
    return cache(lambda family: PeftReference(tiny_models / family, files(family)))


@pytest.fixture
def floats() -> Iterator[None]:
    with as_floats():
        yield


@pytest.mark.usefixtures("floats")
@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_jobs_with_different_adapters_and_none_share_one_forward(
    family: str, tiny_models: Path, files: Files, lone: Callable[[str], PeftReference]
) -> None:
    """Eight jobs, three adapters in six mixtures: each picture is the one that diffusers and PEFT make alone."""
    jobs = eight_jobs()
    heard = run_together(spec_with(tiny_models / family, files(family)), *jobs)
    assert_all_like_solo(heard, lone(family), jobs)
    assert heard.rows == [8, 8, 8, 7, 3, 1]
    for job in jobs:
        changed = np.abs(heard.pictures[job.id, 0] - lone(family).image(job.model_copy(update={"adapters": ()}))).max()
        assert (changed > 1e-2) == bool(job.adapters), f"{job.id}: {changed}"


def test_an_adapter_that_does_not_load_fails_its_own_job(tiny_models: Path, files: Files, tmp_path: Path) -> None:
    """Missing, no safetensors, of another model, of a kind that is not supported: each is told, companions finish."""
    state = load_file(files("sd")["oil"])
    one = next(name for name in state if name.endswith("lora_A.weight"))
    torch.save(state, tmp_path / "pickle.bin")
    (tmp_path / "junk.safetensors").write_bytes(b"not a safetensors file at all, whatever its name says")
    save_file(state | {"unet.conv_in.dora_scale": torch.ones(1)}, tmp_path / "dora.safetensors")
    save_file(state | {one: state[one][:, :2].contiguous()}, tmp_path / "narrow.safetensors")
    save_file({name: state[name] for name in (one,)}, tmp_path / "half.safetensors")
    save_file({"unet.conv_in.weight": torch.ones(1)}, tmp_path / "whole.safetensors")
    save_file({f"other.{name}": tensor for name, tensor in state.items()}, tmp_path / "foreign.safetensors")
    told = {
        "missing": "holds no safetensors file",
        "pickle": "holds no safetensors file",
        "junk": "cannot be loaded",
        "dora": "dora_scale are not supported",
        "narrow": "but the layer takes",
        "half": "lacks one half",
        "whole": "unet.conv_in.weight",
        "foreign": "it changes other, which the model does not have",
        "unlisted": "no adapter 'unlisted'",
        "flux": "which the model does not have",
    }
    bad = {name: tmp_path / f"{name}.safetensors" for name in told if name not in ("flux", "pickle", "unlisted")}
    bad |= {"pickle": tmp_path / "pickle.bin", "flux": files("flux")["neon"]}
    spec = spec_with(tiny_models / "sd", files("sd") | bad, max_batch=16)
    jobs = [mixable(a_job(name, adapters=adapters_of(("oil", 1.0), (name, 0.5)))) for name in told]
    good = [
        mixable(a_job("none", steps=9)),
        mixable(a_job("fine", adapters=adapters_of(("oil", 1.0)))),
    ]
    heard = Room(spec).run(*good, *jobs)
    assert [heard.ended[job.id].error for job in good] == [None, None]
    for name, words in told.items():
        error = heard.ended[name].error
        assert isinstance(error, AdapterUnavailable), name
        assert words in error.message, f"{name}: {error.message}"
        assert error.param == "adapters"


def test_adapters_load_beside_running_forwards(
    tiny_models: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job under way makes step after step while another's file is read, and then they share forwards."""
    go_on = threading.Event()
    real = adapters_module.read

    def slow(*args: Any) -> Any:
        assert go_on.wait(TIMEOUT_S)
        return real(*args)

    @dataclass
    class Gate(Recorder):
        """After five steps, it has the file read, and the engine's thread wait until that has been told."""

        busy: bool = False

        def on_event(self, event: EngineEvent) -> None:
            super().on_event(event)
            if isinstance(event, JobProgress) and (event.claim_key, event.step) == ("under-way", 5):
                self.busy = room.engine.status().activity.busy
                go_on.set()
                wait_until(lambda: not room.engine._inbox.empty(), "the adapter has been read", TIMEOUT_S)

    monkeypatch.setattr(adapters_module, "read", slow)
    gate = Gate()
    room = Room(spec_with(tiny_models / "sd", files("sd")), recorder=gate)
    heard = room.run(
        mixable(a_job("under-way", steps=12)),
        mixable(a_job("waiting", adapters=adapters_of(("oil", 1.0)))),
    )
    assert ("loading", "waiting") in heard.heard
    assert gate.busy
    assert heard.rows == [*[1] * 5, *[2] * 4, *[1] * 3], "it joins at the sixth step"
    ended = heard.ended["waiting"]
    assert (ended.error, ended.batching.max_jobs) == (None, 2)
    assert ended.load_ms is not None


@pytest.mark.usefixtures("floats")
def test_memory_for_adapters_is_bounded_and_what_is_in_use_stays(
    tiny_models: Path, files: Files, lone: Callable[[str], PeftReference]
) -> None:
    """With no room for any, jobs keep theirs to the end; what no job uses is let go of, and loaded again when asked."""
    jobs = eight_jobs()
    room = Room(spec_with(tiny_models / "sd", files("sd")), adapter_memory_bytes=1)
    heard = room.run(*jobs)
    assert_all_like_solo(heard, lone("sd"), jobs)
    (model,) = room.engine._models.loaded.values()
    assert model.adapters.attached == ()
    assert not any(module._forward_hooks for module in model.adapters.modules["unet"].module.modules())


def test_reproducible_pictures_have_the_same_bits_beside_any_adapters(tiny_models: Path, files: Files) -> None:
    """With adapters and without, alone and among jobs with others: not one bit differs."""
    spec = spec_with(tiny_models / "sd", files("sd"))
    exact = [
        mixable(a_job("exact", reproducible=True, adapters=adapters_of(("ink", 0.8)))),
        mixable(a_job("exact-bare", reproducible=True)),
    ]
    expected = {job.id: run_together(spec, job).pictures[job.id, 0] for job in exact[:1]}
    expected |= {"exact-bare": Room(spec).run(exact[1]).pictures["exact-bare", 0]}
    chance = random.Random(5)
    rows = []
    for _ in range(2):
        others = [
            mixable(
                a_job(
                    f"other{at}",
                    reproducible=True,
                    steps=chance.randint(3, 6),
                    adapters=adapters_of(*chance.choice([(), (("oil", 1.0),), (("ink", 0.8),), (("neon", 2.0),)])),
                )
            )
            for at in range(chance.randint(1, 5))
        ]
        company = [*others, *exact]
        chance.shuffle(company)
        heard = run_together(spec, *company)
        rows += heard.rows
        for job in exact:
            assert np.array_equal(heard.pictures[job.id, 0], expected[job.id]), job.id
    assert max(rows) == 4


@pytest.mark.usefixtures("floats")
def test_adapters_follow_their_rows_when_memory_runs_out(
    tiny_models: Path, files: Files, lone: Callable[[str], PeftReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that is split is stacked anew, and each part wears its own."""
    monkeypatch.setattr("worker.engine.engine.run_self_check", lambda _model, _device: None)
    real = SharedMethod.run

    def scarce(point: SharedMethod, *args: Any, **kwargs: Any) -> Any:
        if point.component == "unet" and point.bind(args, kwargs)["sample"].shape[0] > 2 * 4:
            raise torch.OutOfMemoryError("injected")
        return real(point, *args, **kwargs)

    jobs = eight_jobs()
    # Those that bring the adapters into memory are spared: how many of them meet is a matter of chance.
    run_short = partial(monkeypatch.setattr, SharedMethod, "run", scarce)
    heard = run_together(spec_with(tiny_models / "sd", files("sd")), *jobs, before=run_short)
    assert_all_like_solo(heard, lone("sd"), jobs)
    assert max(heard.rows) == 4
