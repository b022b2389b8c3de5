"""Compiled blocks: the same images, and no compilation after the warm-up, whatever rows, sizes and adapters come."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.adapters import adapters_of, denoiser, load_pipeline, mixable, spec_with
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder, a_job, a_spec
from parity.running import TOLERANCE, as_floats
from tiny import lora
from tiny.registry import save_tiny

from shared.config.model_spec import ModelSpec
from shared.errors import ModelUnavailable
from shared.job import Job
from worker.engine.pipelines import compiling
from worker.engine.pipelines.loading import load

# torch's own, of what it uses of itself.
pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning"),
]
SIZES = ((64, 64), (64, 96), (96, 64), (128, 64), (112, 80))
ADAPTERS = ("ink", "oil", "neon")
needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: g++ is not installed")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def batches() -> Iterator[list[Job]]:
    """Yield 1 to 8 jobs of each size, with and without adapters and guidance, with prompts of several lengths."""
    for (width, height), count in product(SIZES, range(1, 9)):
        jobs = [
            a_job(
                f"{width}x{height}-{count}-{at}",
                width=width,
                height=height,
                prompt="a dog" + " and another" * (at * count % 4),
                guidance_scale=(1.0, 4.0)[(at + count) % 2],
                steps=2,
                adapters=adapters_of((ADAPTERS[at % 3], 1.0)) if (at + count) % 3 else (),
            )
            for at in range(count)
        ]
        yield [mixable(job) for job in jobs]


def run_batches(spec: ModelSpec) -> tuple[EventRecorder, list[int]]:
    """Run `batches` one after the other, after a warm-up; return also the graphs compiled before and after them."""
    harness = EngineHarness(spec)
    with as_floats(), harness.started() as engine:
        engine.warm_up()
        graphs = [compiled_graphs()]
        for jobs in batches():
            harness.submit(*jobs)
            harness.recorder.wait_for([job.id for job in jobs])
        graphs.append(compiled_graphs())
    failed = {ended.error.message for ended in harness.recorder.finished.values() if ended.error}
    assert not failed
    return harness.recorder, graphs


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.timeout(600)  # a compiler on a busy machine
@pytest.mark.parametrize("family", ["flux", "qwen-image", "sd"])
def test_nothing_is_compiled_after_the_warm_up(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(family, tmp_path / family)
    pipeline = load_pipeline(folder)
    files = {
        name: lora.save(pipeline, tmp_path / f"{name}.safetensors", at, components=(denoiser(pipeline),))
        for at, name in enumerate(ADAPTERS)
    }
    expected, _ = run_batches(spec_with(folder, files))
    monkeypatch.setattr(compiling, "AFTER_WARM_UP", "fail_on_recompile")
    made, (before, after) = run_batches(spec_with(folder, files, compile="blocks"))
    assert 0 < before == after
    assert set(range(1, 9)) <= set(made.rows)
    for key, image in expected.images.items():
        off = np.abs(made.images[key] - image).max()
        assert off <= TOLERANCE, f"{key} is off by {off}"


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.timeout(600)
def test_compiled_code_is_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    spec = a_spec(save_tiny("flux", tmp_path / "flux"), compile="blocks", max_batch=1)
    graphs, missed = [], []
    for _ in range(2):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        with EngineHarness(spec).started() as engine:
            engine.warm_up()
        graphs.append(compiled_graphs())
        missed.append(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"])
    assert graphs[0] == graphs[1] == missed[0] > 0
    assert missed[1] == 0


def test_a_denoiser_without_named_blocks_is_refused(tiny_models: Path) -> None:
    with pytest.raises(ModelUnavailable, match="SD3Transformer2DModel names no repeated blocks; use compile = true"):
        load(a_spec(tiny_models / "sd3", compile="blocks"), tiny_models / "sd3", torch.device("cpu"))


class ConvolutionBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Conv2d(4, 4, 1)


def test_blocks_with_layers_that_adapters_would_not_reach_are_refused() -> None:
    module = torch.nn.Sequential(ConvolutionBlock())
    module._repeated_blocks = ["ConvolutionBlock"]
    compiling.check_blocks(module, a_spec("a", compile="blocks"))
    with pytest.raises(ValueError, match="Sequential has convolutions in its blocks, so it needs no adapters"):
        compiling.check_blocks(module, spec_with(Path("a"), {"ink": Path("ink.safetensors")}, compile="blocks"))
