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
from harness import jobs as factory
from harness.engine import Recorder, Room, a_job, a_spec
from pydantic import ValidationError

from shared.config.models_file import AdapterSpec, ModelSpec
from worker.engine import warm_up
from worker.engine.pipelines.loading import locate

# torch's own, of what it uses of itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return factory.save("sd", tmp_path / "sd")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def served(spec: ModelSpec, after_warm_up: Callable[[], None] = lambda: None) -> Recorder:
    """Run one job, then two at once, on a worker that was warmed up."""
    room = Room(spec)
    with room.started() as engine:
        engine.warm_up()
        after_warm_up()
        for names in (["a"], ["b", "c"]):
            room.seat(*(a_job(name) for name in names))
            room.recorder.wait_for(names)
    assert not [ended.error for ended in room.recorder.ended.values() if ended.error]
    return room.recorder


def pixels(recorder: Recorder) -> dict[Any, np.ndarray]:
    return {key: getattr(made, "pixels", made).astype(int) for key, made in recorder.pictures.items()}


def test_a_compiled_model_makes_the_same_pictures_and_compiles_before_it_serves(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler that a machine has is not what is tested: what it is given, and when, is."""
    compiled: list[float] = []
    ready: list[float] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        compiled.append(time.monotonic())
        return graph.forward

    monkeypatch.setattr(warm_up, "COMPILER", backend)
    eager = pixels(served(a_spec(weights, max_batch=2)))
    assert not compiled
    made = pixels(served(a_spec(weights, max_batch=2, compile=True), lambda: ready.append(time.monotonic())))
    assert compiled
    assert max(compiled) < ready[0], "a job's forward had to wait for the compiler"
    assert made.keys() == eager.keys()
    for key, picture in made.items():
        assert np.abs(picture - eager[key]).max() <= 1


def test_a_model_that_cannot_be_compiled_runs_as_it_is(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a C++ compiler: slower is better than not at all."""
    tried: list[str] = []

    def backend(_graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        tried.append("once more")
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(warm_up, "COMPILER", backend)
    served(a_spec(weights, max_batch=2, compile=True), tried.clear)
    assert not tried, "given up at the warm-up, not at each job"


@pytest.mark.parametrize(
    "fields", [{"offload": "group"}, {"adapter": (AdapterSpec(id="ink", source="/ink"),)}], ids=["offload", "adapters"]
)
def test_what_changes_a_forward_excludes_compiling(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="compile goes with"):
        ModelSpec(id="m", source="/m", compile=True, **fields)


def test_a_pinned_revision_is_what_is_fetched(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker loads the same weights, whatever the hub's main branch has come to be."""
    asked: dict[str, Any] = {}

    def download(source: str, **wanted: Any) -> str:
        asked.update(wanted, source=source)
        return str(weights)

    monkeypatch.setattr(DiffusionPipeline, "download", download)
    folder, _ = locate(ModelSpec(id="m", source="someone/model", revision="0123abcd", variant="fp16"))
    assert folder == weights
    assert (asked["source"], asked["revision"], asked["variant"]) == ("someone/model", "0123abcd", "fp16")
