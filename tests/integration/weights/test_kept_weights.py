"""Evicted models stay in CPU memory while there is room; a result after their return is the same."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec
from harness.scorers import save_scorer
from tiny import controls

from shared.config.candidates import BestOf, ScorerSpec
from shared.config.controls import ControlSpec
from shared.config.refiners import RefinerSpec
from shared.config.request_limits import Limits
from worker.engine.models import cpu_memory
from worker.engine.models.cpu_memory import CpuMemory, KeptModel, KeptModels
from worker.engine.pipelines.loading import load, locate
from worker.engine.protocol import ModelLoaded

pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("quick_loads"),
]
GIB = 2**30
CPU = torch.device("cpu")
WITH_MEMORY = (torch.Tensor, torch.nn.Parameter)  # subclasses, such as those of compiled graphs, may have none


def one_at_a_time(folders: Mapping[str, Path], **settings: Any) -> EngineHarness:
    """Return an engine whose device has memory for one of its models."""
    specs = [a_spec(folder, model=model) for model, folder in folders.items()]
    largest = max(locate(spec)[1] for spec in specs)
    return EngineHarness(*specs, gpu_memory_bytes=int(1.2 * largest), **settings)


def run_in_turn(harness: EngineHarness, models: Sequence[str]) -> list[np.ndarray[Any, Any]]:
    """Run the same job by each of the models in order, and return the images."""
    for at, model in enumerate(models):
        spec = harness.specs[model]
        own: dict[str, Any] = {} if spec.refiner is None else {"refiner_start": 0.5}
        own |= {} if spec.scorer is None else {"best_of": BestOf(candidates=2, at=(0.5,))}
        harness.submit(a_job(f"job{at}", model=model, seed=7, prompt="a boat", steps=2, **own))
        harness.recorder.wait_for([f"job{at}"])
        error = harness.recorder.finished[f"job{at}"].error
        assert error is None, error.message
    return [harness.recorder.images[f"job{at}", 0] for at in range(len(models))]


def loads(harness: EngineHarness) -> list[tuple[str, bool]]:
    """Return the model of each load, and whether it came from CPU memory."""
    return [(one.model, one.from_cpu_memory) for one in harness.recorder.model_events if isinstance(one, ModelLoaded)]


@pytest.mark.parametrize("copies", [False, True])
def test_an_evicted_model_comes_back_without_a_load_and_with_the_same_result(
    copies: bool, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, also where the device has its own memory and the weights are copied there and back."""
    monkeypatch.setattr(cpu_memory, "copies_weights", lambda _: copies)
    harness = one_at_a_time({"one": tiny_models / "sd", "two": tiny_models / "sd"}, cpu_memory_bytes=GIB)
    with harness.started() as engine:
        first, _, again = run_in_turn(harness, ["one", "two", "one"])
        status = engine.status()
    assert np.array_equal(first, again)
    assert loads(harness) == [("one", False), ("two", False), ("one", True)]
    assert (status.loaded_models, status.kept_models) == (("one",), ("two",))
    assert status.kept_bytes > 0
    took = {one.model: one.seconds for one in harness.recorder.model_events if isinstance(one, ModelLoaded)}
    assert status.load_seconds["two"] != took["two"], "the next claim counts a copy"


@pytest.mark.parametrize("family", ["flux", "sdxl", "cast", "refined", "rated"])
def test_results_are_the_same_after_copies(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text encoders with shared weights, a VAE of another dtype, and layers that cast their own weights.

    On a CPU the last bits depend on the alignment of the weights, which are not aligned in their files.
    """
    monkeypatch.setattr(cpu_memory, "copies_weights", lambda _: True)
    changes: dict[str, Any] = {
        "flux": {},
        "sdxl": {"dtype": "bfloat16"},
        "cast": {"layerwise_casting": "float8_e4m3fn"},
        "refined": {"refiner": RefinerSpec(source=str(tiny_model("sdxl-refiner")))},
        "rated": {"scorer": ScorerSpec(source=str(save_scorer(tmp_path)))},
    }[family]
    folder = tiny_model({"cast": "flux", "refined": "sdxl", "rated": "sd"}.get(family, family))
    spec, other = a_spec(folder, model="one", **changes), a_spec(folder, model="two", **changes)
    budget = int(1.2 * load(spec, folder, CPU).nbytes)
    harness = EngineHarness(spec, other, gpu_memory_bytes=budget, cpu_memory_bytes=GIB)
    with harness.started():
        images = run_in_turn(harness, ["one", "two", "one", "two", "one"])
    assert np.array_equal(images[2], images[4])
    assert np.abs(images[0].astype(int) - images[2]).max() <= 1
    assert [kept for _, kept in loads(harness)] == [False, False, True, True, True]


def test_all_modules_that_jobs_share_are_copied_with_their_model(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Those beside the pipeline too: of a refiner, a scorer, a control net and Redux."""
    source = tiny_model("flux")
    beside = (
        ControlSpec(id="like", kind="redux", source=str(controls.save_redux(tmp_path / "redux", 1))),
        ControlSpec(id="edges", source=str(controls.save(source, tmp_path / "net", 2))),
    )
    scorer = ScorerSpec(source=str(save_scorer(tmp_path)))
    refiner = RefinerSpec(source=str(tiny_model("sdxl-refiner")))
    flux = a_spec(source, control=beside, scorer=scorer, limits=Limits(multiple_of=16))
    for spec in (flux, a_spec(tiny_model("sdxl"), refiner=refiner)):
        model = load(spec, Path(spec.source), CPU)
        watched = {id(module) for module in model.watch.modules}
        assert [method.name for method in model.shared_methods if id(method.module) not in watched] == []


def test_without_cpu_memory_each_switch_is_a_load(tiny_models: Path) -> None:
    harness = one_at_a_time({"one": tiny_models / "sd", "two": tiny_models / "sd"}, cpu_memory_bytes=0)
    with harness.started() as engine:
        run_in_turn(harness, ["one", "two", "one"])
        assert engine.status().kept_models == ()
    assert [kept for _, kept in loads(harness)] == [False, False, False]


def test_the_least_recently_used_kept_model_is_dropped(tiny_models: Path) -> None:
    """With room for two of three models beside the one on the device, which come back."""
    names = ("one", "two", "three", "four")
    nbytes = load(a_spec(tiny_models / "sd"), tiny_models / "sd", CPU).nbytes
    harness = one_at_a_time(dict.fromkeys(names, tiny_models / "sd"), cpu_memory_bytes=int(2.5 * nbytes))
    with harness.started() as engine:
        run_in_turn(harness, names)
        assert engine.status().kept_models == ("two", "three")


def test_kept_models_make_room_for_loads_where_memory_is_short(
    tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a configured budget a quarter of the memory stays free."""
    memory = [CpuMemory(100 * GIB, 50 * GIB)]
    monkeypatch.setattr(cpu_memory, "cpu_memory", lambda: memory[0])
    harness = one_at_a_time(dict.fromkeys(("one", "two", "three"), tiny_models / "sd"), cpu_memory_bytes=None)
    with harness.started() as engine:
        run_in_turn(harness, ["one", "two"])
        assert engine.status().kept_models == ("one",)
        memory[0] = CpuMemory(100 * GIB, 24 * GIB)
        harness.submit(a_job("short", model="three", steps=2))
        harness.recorder.wait_for(["short"])
        assert engine.status().kept_models == ()


def test_models_evicted_at_once_are_kept_only_if_all_fit(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts memory as free until the copy of a kept model has ended."""
    folder = tiny_models / "sd"
    first, second, third = (load(a_spec(folder, model=name), folder, CPU) for name in ("one", "two", "three"))
    memory = CpuMemory(total=8 * first.nbytes, available=3 * first.nbytes + 2**20)  # a quarter stays free
    monkeypatch.setattr(cpu_memory, "cpu_memory", lambda: memory)
    monkeypatch.setattr(cpu_memory, "copies_weights", lambda _: True)
    models = KeptModels(CPU, None)
    dropped, kept = models.add(first), models.add(second)
    assert dropped is not None
    assert kept is not None
    assert models.names == ("two",)
    for one in (dropped, kept):
        models.move_out(one)
    devices = [{weight.device.type for weight in module.parameters()} for module in first.watch.modules]
    assert set().union(*devices) == {"meta"}, "its weights are freed without a copy"
    assert models.add(third) is not None
    assert models.names == ("two", "three"), "a copy that has ended counts no longer"


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_no_weight_stays_on_the_device(family: str, tiny_models: Path) -> None:
    """No tensor is left that shares memory with the weights from before the move."""
    model = load(a_spec(tiny_models / family), tiny_models / family, CPU)
    kept, states = KeptModel(model, copies=True), [module.state_dict() for module in model.watch.modules]
    before = {weight.data_ptr() for state in states for weight in state.values()}
    values = [{name: weight.clone() for name, weight in state.items()} for state in states]
    del states
    kept.move_out()
    left = [one for one in gc.get_objects() if type(one) in WITH_MEMORY and one.data_ptr() in before]
    assert [tuple(one.shape) for one in left] == []
    assert len(before) > 10
    kept.move_back()
    for module, state in zip(model.watch.modules, values, strict=True):
        assert all(torch.equal(weight, state[name]) for name, weight in module.state_dict().items())


@pytest.mark.parametrize(
    ("limit", "available"), [("max", 24 * GIB), (str(16 * GIB), 10 * GIB), (str(60 * GIB), 24 * GIB)]
)
def test_the_memory_of_a_container_counts_without_its_page_cache(limit: str, available: int, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {24 * 2**20} kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{9 * GIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {6 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n")
    assert cpu_memory.cpu_memory(tmp_path, tmp_path / "meminfo").available == available
