"""Models over two devices: two ranks on the CPU generate the images of one, and end with their model and together."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder, a_job, a_spec
from harness.hostile_folder import hostile_folder
from harness.waiting import wait_until
from parity.running import ALIKE, TOLERANCE, as_floats

from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.errors import ModelUnavailable
from shared.job import Job
from shared.tasks import Task
from worker.engine.checks import memory_fit
from worker.engine.device import device_of_rank
from worker.engine.errors import RankLost
from worker.engine.parallel import rank_group
from worker.engine.pipelines import loading
from worker.engine.protocol import ForwardDone

pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("shared_models"),
]
CPU = torch.device("cpu")
REMEDY = "give it more (CUDA_VISIBLE_DEVICES) or lower devices"
SPLIT = {"flux": Task.TEXT_TO_IMAGE, "qwen-image": Task.TEXT_TO_IMAGE, "wan-2.1-t2v": Task.TEXT_TO_VIDEO}


@pytest.fixture(scope="module")
def models(tiny_models: Path, tiny_model: Callable[[str], Path]) -> Path:
    for family in SPLIT:
        tiny_model(family)
    return tiny_models


@pytest.fixture(autouse=True)
def group_is_left() -> Iterator[None]:
    """No test leaves a process group."""
    yield
    assert not dist.is_initialized()


def split_spec(folder: Path, **fields: Any) -> ModelSpec:
    task = SPLIT.get(folder.name, Task.TEXT_TO_IMAGE)
    if task is Task.TEXT_TO_VIDEO:
        fields["limits"] = Limits(multiple_of=16, max_frames=9, frames_multiple=4)
    return a_spec(folder, **{"tasks": (task,), "devices": 2, **fields})


def mixed_jobs(spec: ModelSpec) -> list[Job]:
    """Return jobs with different lengths of prompts, steps and guidance; 80 pixels make an odd number of tokens."""
    video = {"frames": 5} if spec.tasks[0].makes_video else {}
    fields: dict[str, Any] = {"task": spec.tasks[0], "width": 80, "height": 80, **video}
    return [
        a_job("short", prompt="fog", steps=2, guidance_scale=1.0, **fields),
        a_job("long", prompt="a very large number of dogs, one behind the other", steps=3, **fields),
        a_job("plain", prompt="a dog", steps=4, guidance_scale=6.0, **fields),
    ]


def run(spec: ModelSpec, jobs: list[Job]) -> EventRecorder:
    with as_floats():
        recorder = EngineHarness(spec).run(*jobs)
    assert not {name: done.error.message for name, done in recorder.finished.items() if done.error}
    return recorder


@pytest.mark.parametrize(
    "family", ["flux", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen-image", "wan-2.1-t2v"))]
)
def test_mixed_jobs_get_the_results_of_one_device(
    family: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the current folder holds files with the names of our packages: the rank does not import them."""
    monkeypatch.chdir(hostile_folder(tmp_path))
    spec = split_spec(models / family)
    jobs = mixed_jobs(spec)
    one, two = (run(spec.model_copy(update={"devices": devices}), jobs) for devices in (1, 2))
    assert max(two.rows) == 3
    assert two.rows == one.rows
    for key, image in one.images.items():
        assert np.abs(two.images[key] - image).max() <= TOLERANCE, key
    assert np.abs(one.images["short", 0] - one.images["plain", 0]).max() > ALIKE


@pytest.mark.usefixtures("quick_loads")
def test_an_evicted_model_ends_its_ranks_and_can_be_loaded_again(models: Path) -> None:
    specs = [split_spec(models / "flux", model="flux"), a_spec(models / "sd", model="sd")]
    budget = max(loading.locate(spec)[1] for spec in specs) + 100_000
    harness = EngineHarness(*specs, gpu_memory_bytes=budget)
    pids: list[int] = []
    with harness.started() as engine:
        for at, model in enumerate(("flux", "sd", "flux")):
            harness.submit(a_job(f"job{at}", model=model, steps=1))
            harness.recorder.wait_for([f"job{at}"])
            if at == 1:
                assert not dist.is_initialized()
            else:
                pids += engine._models.loaded["flux"].ranks.pids
    assert not [done.error for done in harness.recorder.finished.values() if done.error]
    assert len(set(pids)) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


class KillingRecorder(EventRecorder):
    """Kills a rank after the first forward."""

    harness: EngineHarness

    def on_event(self, event: Any) -> None:
        super().on_event(event)
        if isinstance(event, ForwardDone) and len(self.forwards) == 1:
            (pid,) = self.harness.engine._models.loaded["tiny"].ranks.pids
            os.kill(pid, signal.SIGKILL)


def test_a_killed_rank_ends_the_engine_and_fails_no_job(models: Path) -> None:
    """The worker then gives up the engine's jobs, as after a hang; others run them."""
    recorder = KillingRecorder()
    harness = recorder.harness = EngineHarness(split_spec(models / "flux"), recorder=recorder)
    harness.submit(*mixed_jobs(harness.specs["tiny"]))
    with harness.started() as engine:
        wait_until(lambda: engine.join(0), "the engine's thread has ended", 60)
        status = engine.status()
    assert not recorder.finished
    assert status.activity.busy
    assert status.activity.since_s == float("-inf")
    assert "rank 1" in status.failure or "a rank cannot be reached" in status.failure


def test_an_error_of_all_ranks_is_that_of_the_call_and_another_ends_the_group(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "SKEW_S", 0.5)
    monkeypatch.setattr(rank_group, "END_TIMEOUT_S", 0.5)
    spec = split_spec(models / "flux")
    with closing(loading.load(spec, Path(spec.source), CPU)) as model, torch.no_grad():
        (denoiser,) = model.denoisers
        tokens = {"encoder_hidden_states": torch.rand(1, 7, 32), "txt_ids": torch.zeros(7, 3)}
        arguments = {
            **tokens,
            "hidden_states": torch.rand(1, 25, 16),
            "img_ids": torch.zeros(25, 3),
            "pooled_projections": torch.rand(1, 32),
            "guidance": torch.ones(1),
            "timestep": torch.tensor([0.5]),
            "return_dict": False,
        }
        whole = denoiser.run(**arguments)[0]
        assert whole.shape == (1, 25, 16)
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
            denoiser.run(**arguments | {"pooled_projections": torch.rand(1, 5)})
        assert torch.equal(denoiser.run(**arguments)[0], whole)
        with pytest.raises(RankLost, match="failed on some ranks"):
            model.ranks.run("transformer", _failing, **arguments)  # type: ignore[union-attr, arg-type]
        assert model.ranks.lost  # type: ignore[union-attr]
        with pytest.raises(RankLost):
            denoiser.run(**arguments)


def _failing(**_arguments: Any) -> None:
    raise RuntimeError("of this rank only")


@pytest.mark.parametrize(
    ("family", "devices", "message"),
    [
        ("sd", 2, "devices = 2: UNet2DConditionModel cannot be split; remove the key; those that can: Flux2"),
        ("ltx-video", 2, "devices = 2: LTXVideoTransformer3DModel cannot be split"),
        ("ltx-2", 2, "devices = 2: LTX2VideoTransformer3DModel cannot be split"),
        ("helios", 2, "devices = 2: HeliosTransformer3DModel cannot be split"),
        ("flux", 3, "devices = 3: FluxTransformer2DModel has 2 attention heads; use a divisor of 2"),
    ],
)
def test_a_model_that_cannot_be_split_fails_its_load(
    family: str, devices: int, message: str, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(family)
    with pytest.raises(ModelUnavailable, match=message):
        loading.load(a_spec(folder, devices=devices), folder, CPU)


def test_a_rank_that_ends_while_it_loads_fails_the_load(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ModelUnavailable, match="devices = 2: a rank ended while it loaded; see the log"):
        loading.load(split_spec(models / "flux"), models / "flux", CPU)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    ranks = [device_of_rank(rank, 2, torch.device("cuda:1")) for rank in range(2)]
    assert ranks == [torch.device("cuda:1"), torch.device("cuda:2")]
    with pytest.raises(ValueError, match="devices = 2 needs 2 GPUs from cuda:2 on, and this worker sees 3"):
        device_of_rank(0, 2, torch.device("cuda:2"))
    verdict = memory_fit.check_devices(a_spec(Path("a"), devices=4), torch.device("cuda"))
    assert verdict == ("failed", "devices = 4 needs 4 GPUs from cuda:0 on, and this worker sees 3", REMEDY)
    assert memory_fit.check_devices(a_spec(Path("a"), devices=3), torch.device("cuda")) is None
