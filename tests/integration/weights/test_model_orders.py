"""Operators' orders to the engine: loads before jobs, unloads after them, and pins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness.adapters import adapters_of, load_pipeline
from harness.engine import DIFFUSERS_AND_NUMPY, TIMEOUT_S, EngineHarness, a_job, a_spec
from harness.waiting import wait_until
from tiny import lora

from shared.config.adapters import AdapterSpec
from shared.errors import LoadPostponed
from worker.engine.engine_status import EngineStatus
from worker.engine.pipelines.loading import load
from worker.engine.protocol import EngineRequest, MemoryOrder, MemoryOrders, ModelLoaded

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("quick_loads")]
GIB = 2**30


@pytest.fixture(scope="module")
def nbytes(tiny_models: Path) -> int:
    """The size of one of the models."""
    spec = a_spec(tiny_models / "sd")
    return load(spec, tiny_models / "sd", EngineHarness(spec).engine.device).nbytes


def harness_with(tiny_models: Path, models: Sequence[str], budget: float, **settings: Any) -> EngineHarness:
    """Return an engine of models of one size, with a memory of `budget` bytes."""
    specs = [a_spec(tiny_models / "sd", model=model) for model in models]
    return EngineHarness(*specs, gpu_memory_bytes=int(budget), **settings)


def in_memory(status: EngineStatus) -> tuple[str, ...]:
    return status.loaded_models + status.kept_models


def load_order(model: str, number: int) -> MemoryOrder:
    return MemoryOrder(model, False, (number, ""))


def unload_order(model: str, number: int) -> MemoryOrder:
    return MemoryOrder(model, True, (number, ""))


def run(harness: EngineHarness, name: str, model: str, **fields: Any) -> None:
    harness.submit(a_job(name, model=model, steps=2, **fields))
    harness.recorder.wait_for([name])


def test_a_model_is_loaded_before_its_first_job(tiny_models: Path, nbytes: int) -> None:
    """It evicts another one, and its job does not wait for a load."""
    harness = harness_with(tiny_models, ["one", "two"], 1.5 * nbytes)
    with harness.started() as engine:
        run(harness, "first", "one")
        engine.order_models(MemoryOrders(last=(load_order("two", 1),)))
        wait_until(lambda: engine.status().loaded_models == ("two",), "it is loaded", TIMEOUT_S)
        run(harness, "second", "two")
    assert ("loading", "second") not in harness.recorder.log
    assert not engine.status().awaits_jobs


def test_an_unloaded_model_is_freed_and_comes_back_for_a_job(tiny_models: Path, nbytes: int) -> None:
    """Also from CPU memory; the order is followed once."""
    harness = harness_with(tiny_models, ["one", "two"], 1.5 * nbytes, cpu_memory_bytes=GIB)
    with harness.started() as engine:
        run(harness, "first", "one")
        run(harness, "second", "two")
        assert engine.status().kept_models == ("one",)
        orders = MemoryOrders(last=(unload_order("one", 1), unload_order("two", 2)))
        engine.order_models(orders)
        wait_until(lambda: not in_memory(engine.status()), "they are freed", TIMEOUT_S)
        run(harness, "third", "one")
        engine.order_models(MemoryOrders(last=(unload_order("one", 1),)))
        run(harness, "fourth", "one")
        assert engine.status().loaded_models == ("one",)
    loads = [event.from_cpu_memory for event in harness.recorder.model_events if isinstance(event, ModelLoaded)]
    assert loads == [False, False, False]


def test_an_order_waits_for_running_jobs(tiny_models: Path, nbytes: int) -> None:
    """Meanwhile their model stays, and the engine asks for no further ones."""
    harness = harness_with(tiny_models, ["one"], 1.5 * nbytes)
    loaded_meanwhile = set()

    def ended() -> bool:
        loaded = engine.status().loaded_models
        if "running" in harness.recorder.finished:
            return True
        loaded_meanwhile.add(loaded)
        return False

    with harness.started() as engine:
        harness.submit(a_job("running", model="one", steps=40))
        wait_until(lambda: harness.recorder.rows, "the job runs", TIMEOUT_S)
        engine.order_models(MemoryOrders(last=(unload_order("one", 1),)))
        wait_until(lambda: engine.status().awaits_jobs, "the order waits", TIMEOUT_S)
        wait_until(ended, "the job has ended", TIMEOUT_S)
        wait_until(lambda: not engine.status().loaded_models, "the model is freed", TIMEOUT_S)
        wait_until(lambda: not engine.status().awaits_jobs, "jobs can come again", TIMEOUT_S)
    assert harness.recorder.finished["running"].error is None
    assert loaded_meanwhile == {("one",)}


def test_a_pinned_model_is_loaded_and_not_evicted(tiny_models: Path, nbytes: int) -> None:
    """With memory for two models the other ones take turns."""
    harness = harness_with(tiny_models, ["one", "two", "three"], 2.5 * nbytes)
    with harness.started() as engine:
        engine.order_models(MemoryOrders(pinned=("one",)))
        for at, model in enumerate(("two", "three", "two", "three")):
            run(harness, f"job{at}", model)
        assert set(engine.status().loaded_models) == {"one", "three"}
        assert engine.status().pinned_models == ("one",)
        engine.order_models(MemoryOrders())
        for at, model in enumerate(("two", "three", "two"), 4):
            run(harness, f"job{at}", model)
        assert "one" not in engine.status().loaded_models


def test_unused_adapters_of_a_pinned_model_make_room_for_another_model(
    tiny_models: Path, tmp_path: Path, nbytes: int
) -> None:
    """They stay in memory for the next job as long as there is room."""
    file = lora.save(load_pipeline(tiny_models / "sd"), tmp_path / "ink.safetensors", 1, ("unet",))
    harness = harness_with(tiny_models, ["one", "two"], 2 * nbytes + 1000)
    with harness.started() as engine:
        engine.order_models(MemoryOrders(pinned=("one",)))
        job = a_job("with adapter", model="one", adapters=adapters_of(("ink", 1.0)))
        adapters = (AdapterSpec(id="ink", source=str(file)),)
        engine.submit(EngineRequest(job.id, job, a_spec(tiny_models / "sd", model="one"), adapters=adapters))
        harness.recorder.wait_for([job.id])
        assert engine.status().models_bytes > nbytes + 1000
        run(harness, "other", "two")
        assert set(engine.status().loaded_models) == {"one", "two"}
    assert harness.recorder.finished["other"].error is None


def test_jobs_of_a_model_without_memory_next_to_pins_are_given_back(tiny_models: Path, nbytes: int) -> None:
    """With the reason; once a pin has ended the model is loaded again."""
    harness = harness_with(tiny_models, ["one", "two"], 1.5 * nbytes, load_retry_s=600)
    with harness.started() as engine:
        engine.order_models(MemoryOrders(pinned=("one",)))
        run(harness, "refused", "two")
        error = harness.recorder.finished["refused"].error
        assert isinstance(error, LoadPostponed)
        assert "next to the pinned models" in error.message
        assert "unpin one" in engine.status().unavailable_models["two"].reason
        engine.order_models(MemoryOrders())
        wait_until(lambda: not engine.status().unavailable_models, "the model can be loaded", TIMEOUT_S)
        run(harness, "later", "two")
    assert harness.recorder.finished["later"].error is None


def test_a_pin_that_does_not_fit_says_so_and_the_first_one_stays(tiny_models: Path, nbytes: int) -> None:
    harness = harness_with(tiny_models, ["one", "two"], 1.5 * nbytes, load_retry_s=600)
    with harness.started() as engine:
        engine.order_models(MemoryOrders(pinned=("one", "two")))
        wait_until(lambda: "two" in engine.status().unavailable_models, "the second pin fails", TIMEOUT_S)
        assert engine.status().loaded_models == ("one",)
        assert "pinned models" in engine.status().unavailable_models["two"].reason
        engine.order_models(MemoryOrders(pinned=("two",)))
        wait_until(lambda: engine.status().loaded_models == ("two",), "it takes the memory of the ended pin", TIMEOUT_S)


def test_the_warm_up_follows_the_orders(tiny_models: Path, nbytes: int) -> None:
    """A worker that starts loads pinned models first, and none that was unloaded."""
    harness = harness_with(tiny_models, ["one", "two", "three"], 2.5 * nbytes)
    harness.engine.order_models(MemoryOrders(pinned=("three",), last=(unload_order("one", 1),)))
    with harness.started() as engine:
        engine.warm_up()
        assert engine.status().loaded_models == ("three", "two")
