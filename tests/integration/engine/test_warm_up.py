"""What is set up before a model serves: compiled denoisers, and the row counts in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from harness.engine import EngineHarness, EventRecorder, a_job, a_spec
from pydantic import ValidationError

from shared.config.adapters import AdapterSpec
from shared.config.model_spec import ModelSpec
from worker.engine.pipelines import compiling
from worker.engine.pipelines.loading import locate

# torch's own, of what it uses of itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def weights(tiny_models: Path) -> Path:
    return tiny_models / "sd"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run_jobs(spec: ModelSpec, after_warm_up: Callable[[], None] = lambda: None) -> EventRecorder:
    """Run one job, then two at once, on an engine after its warm-up."""
    harness = EngineHarness(spec)
    with harness.started() as engine:
        engine.warm_up()
        after_warm_up()
        for names in (["a"], ["b", "c"]):
            harness.submit(*(a_job(name) for name in names))
            harness.recorder.wait_for(names)
    assert not [ended.error for ended in harness.recorder.finished.values() if ended.error]
    return harness.recorder


def pixels(recorder: EventRecorder) -> dict[Any, np.ndarray]:
    return {key: getattr(made, "pixels", made).astype(int) for key, made in recorder.images.items()}


@pytest.mark.slow
def test_a_compiled_model_generates_the_same_images_and_compiles_before_its_first_job(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test replaces the compiler, which depends on the machine."""
    compiled: list[float] = []
    ready: list[float] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        compiled.append(time.monotonic())
        return graph.forward

    monkeypatch.setattr(compiling, "COMPILER", backend)
    eager = pixels(run_jobs(a_spec(weights, max_batch=2)))
    assert not compiled
    made = pixels(run_jobs(a_spec(weights, max_batch=2, compile=True), lambda: ready.append(time.monotonic())))
    assert compiled
    assert max(compiled) < ready[0], "a job waited for the compiler"
    assert made.keys() == eager.keys()
    for key, image in made.items():
        assert np.abs(image - eager[key]).max() <= 1


@pytest.mark.parametrize("compile", [pytest.param(True, marks=pytest.mark.slow), "blocks"])
def test_a_model_that_cannot_be_compiled_runs_uncompiled(
    compile: Any, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example on a machine without a C++ compiler."""
    attempts: list[str] = []

    def backend(_graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        attempts.append("attempt")
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compiling, "COMPILER", backend)
    run_jobs(a_spec(weights, max_batch=2, compile=compile), attempts.clear)
    assert not attempts, "compilation is tried at the warm-up only"


@pytest.mark.parametrize(
    "fields", [{"offload": "group"}, {"adapter": (AdapterSpec(id="ink", source="/ink"),)}], ids=["offload", "adapters"]
)
def test_offload_and_adapters_exclude_compilation_of_the_whole(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"compile (= true )?needs"):
        ModelSpec(id="m", source="/m", compile=True, **fields)


def test_a_pinned_revision_is_downloaded(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers load the same weights, whatever the hub's main branch is."""
    request: dict[str, Any] = {}

    def download(source: str, **options: Any) -> str:
        request.update(options, source=source)
        return str(weights)

    monkeypatch.setattr(DiffusionPipeline, "download", download)
    folder, _ = locate(ModelSpec(id="m", source="someone/model", revision="0123abcd", variant="fp16"))
    assert folder == weights
    assert (request["source"], request["revision"], request["variant"]) == ("someone/model", "0123abcd", "fp16")
