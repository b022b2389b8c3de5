"""A changed models file in the engine: models are added, loaded anew and freed, and the others stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.engine import DIFFUSERS_AND_NUMPY, TIMEOUT_S, EngineHarness, a_job, a_spec
from harness.waiting import wait_until

from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults
from worker.engine.engine_status import EngineStatus
from worker.engine.models import model_cache
from worker.engine.pipelines.loading import load
from worker.engine.protocol import ModelLoaded

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("quick_loads")]
EVERY = ("one", "same", "changed", "removed")
"""Models whose entries change, which are those of their test only."""


def spec(tiny_models: Path, model: str, **fields: Any) -> ModelSpec:
    return a_spec(tiny_models / "sd", model=model, **fields)


def run(harness: EngineHarness, name: str, model: str, **fields: Any) -> None:
    harness.submit(a_job(name, model=model, steps=2, **fields))
    harness.recorder.wait_for([name])


def loads(harness: EngineHarness) -> list[str]:
    return [event.model for event in harness.recorder.model_events if isinstance(event, ModelLoaded)]


def wait_for_loaded(engine: Any, *models: str) -> EngineStatus:
    wait_until(lambda: sorted(engine.status().loaded_models) == sorted(models), f"{models} are loaded", TIMEOUT_S)
    status: EngineStatus = engine.status()
    return status


def test_models_are_added_loaded_anew_and_removed(tiny_models: Path) -> None:
    """A model whose entry has not changed is not loaded again."""
    harness = EngineHarness(*(spec(tiny_models, model) for model in ("same", "changed", "removed")), fresh=EVERY)
    with harness.started() as engine:
        engine.warm_up()
        before = loads(harness)
        changed = spec(tiny_models, "changed", dtype="float16")
        listed = Catalog((spec(tiny_models, "same"), changed, spec(tiny_models, "added")))
        engine.replace_models(listed, {"changed", "removed", "added"})
        wait_for_loaded(engine, "same", "changed", "added")
        wait_until(lambda: len(loads(harness)) == len(before) + 2, "both are loaded", TIMEOUT_S)
        assert sorted(loads(harness)[len(before) :]) == ["added", "changed"]
        assert engine._models.loaded["changed"].spec.dtype == "float16"
        assert engine.status().model_bytes.keys() == {"same", "changed", "added"}
        run(harness, "job", "same")


def test_a_change_of_a_default_keeps_the_model(tiny_models: Path) -> None:
    harness = EngineHarness(spec(tiny_models, "one"), fresh=EVERY)
    with harness.started() as engine:
        engine.warm_up()
        before = loads(harness)
        engine.replace_models(Catalog((spec(tiny_models, "one", defaults=Defaults(steps=3)),)), frozenset())
        run(harness, "job", "one")
        assert engine._models.loaded["one"].spec.defaults.steps == 3
        assert loads(harness) == before


def test_a_model_that_could_not_be_loaded_is_loaded_from_its_new_source(tiny_models: Path, tmp_path: Path) -> None:
    """Without the delay before the next load of the old one."""
    harness = EngineHarness(spec(tiny_models, "one").model_copy(update={"source": str(tmp_path)}), fresh=EVERY)
    with harness.started() as engine:
        engine.warm_up()
        assert engine.status().unavailable_models
        engine.replace_models(Catalog((spec(tiny_models, "one"),)), {"one"})
        status = wait_for_loaded(engine, "one")
        assert not status.unavailable_models
        run(harness, "job", "one")


def test_a_model_that_is_being_loaded_for_an_earlier_entry_is_loaded_again(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs wait for the weights of the present entry."""
    harness = EngineHarness(spec(tiny_models, "one"), fresh=EVERY)

    def load_and_change(earlier: ModelSpec, *arguments: Any) -> Any:
        if earlier.dtype == "float32":
            listed = Catalog((spec(tiny_models, "one", dtype="float16"),))
            engine.replace_models(listed, {"one"})
            harness.submit(a_job("job", model="one", steps=2))
        return load(earlier, *arguments)

    monkeypatch.setattr(model_cache, "load", load_and_change)
    with harness.started() as engine:
        engine.warm_up()
        harness.recorder.wait_for(["job"])
        assert engine._models.loaded["one"].spec.dtype == "float16"
        assert loads(harness) == ["one"]
