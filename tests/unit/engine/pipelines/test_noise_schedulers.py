"""Noise schedulers in the engine do not wait for the device, and their images stay the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from harness.pretended_device import DEVICE, PretendedDevice
from harness.pretended_runs import fused_work, load_pretended, sample_jobs

from bench.engine import shapes
from worker.engine.checks import self_check
from worker.engine.pipelines import noise_schedulers
from worker.engine.pipelines.loaded_model import LoadedModel
from worker.engine.pipelines.noise_schedulers import TIMESTEPS_ON_DEVICE, TIMESTEPS_ON_HOST, avoid_waiting

pytestmark = pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning")  # some schedulers, under numpy 2.4

STEPS = 6
CPU = torch.device("cpu")
OPTIONS: dict[str, dict[str, Any]] = {
    "DPMSolverMultistepScheduler": {"algorithm_type": "sde-dpmsolver++"},
    "UniPCMultistepScheduler": {"solver_order": 3},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in sorted(TIMESTEPS_ON_HOST)] + list(OPTIONS.items())


def denoise(scheduler: Any, device: torch.device, counter: PretendedDevice | None = None) -> torch.Tensor:
    """Run the steps of a job with a denoiser that is a formula; `counter` counts those after the first."""
    noise = torch.Generator().manual_seed(1)
    latents, target = (torch.randn((1, 4, 8, 8), generator=noise).to(device) for _ in range(2))
    scheduler.set_timesteps(STEPS, device=device)
    has_generator = "generator" in inspect.signature(scheduler.step).parameters
    options: dict[str, Any] = {"generator": noise} if has_generator else {}
    previous = None
    for at, time in enumerate(scheduler.timesteps):
        scale = getattr(scheduler, "scale_model_input", lambda sample, _time: sample)
        predicted = 0.3 * target + 0.1 * scale(latents, time)
        if "timestep_back" in inspect.signature(scheduler.step).parameters:
            back = scheduler.timesteps[at - 1] if at else None
            latents, previous = scheduler.step(predicted, previous, time, back, latents, **options, return_dict=False)
        else:
            latents = scheduler.step(predicted, time, latents, **options, return_dict=False)[0]
        if counter is not None and at == 0:
            counter.reset()
    return latents


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_steps_do_not_wait_and_the_latents_are_the_same(name: str, options: dict[str, Any]) -> None:
    expected = denoise(getattr(diffusers, name)(**options), CPU)
    scheduler = getattr(diffusers, name)(**options)
    avoid_waiting(scheduler)
    with torch.no_grad(), PretendedDevice() as device:
        latents = denoise(scheduler, DEVICE, device)
        assert device.waits == {}
        assert torch.equal(latents.cpu(), expected)


def test_noise_is_copied_without_waiting_where_timesteps_stay_on_the_device() -> None:
    scheduler = diffusers.SCMScheduler()
    avoid_waiting(scheduler)
    with torch.no_grad(), PretendedDevice() as device:
        scheduler.set_timesteps(2, intermediate_timesteps=1.3, device=DEVICE)
        assert scheduler.timesteps.device == DEVICE
        latents = torch.zeros((1, 4, 8, 8), device=DEVICE)
        scheduler.step(latents, scheduler.timesteps[0], latents, generator=torch.Generator())
        device.reset()
        scheduler.step(latents, scheduler.timesteps[1], latents, generator=torch.Generator())
        assert device.waits == {}


@pytest.mark.parametrize("name", sorted(TIMESTEPS_ON_HOST | TIMESTEPS_ON_DEVICE))
def test_the_changed_scheduler_has_the_class_name_and_arguments_of_its_own(name: str) -> None:
    """Pipelines look at both."""
    own: Any = getattr(diffusers, name)
    scheduler = own()
    avoid_waiting(scheduler)
    assert isinstance(scheduler, own)
    assert type(scheduler).__name__ == name
    for method in ("set_timesteps", "step"):
        assert inspect.signature(getattr(type(scheduler), method)) == inspect.signature(getattr(own, method))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("sd")
    shapes.save("sd", path)
    return path


@pytest.fixture
def device() -> Iterator[PretendedDevice]:
    with torch.no_grad(), PretendedDevice() as pretended:
        yield pretended


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    with torch.no_grad(), PretendedDevice() as device, device.paused():
        return load_pretended(folder)


@pytest.fixture
def model(loaded: LoadedModel, device: PretendedDevice, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A model with timesteps on the host, whose self-check runs two jobs: an operation takes 0.1 ms here."""
    monkeypatch.setattr(self_check, "PROMPTS", self_check.PROMPTS[:2])
    loaded.timesteps_on_host = True
    return loaded


@pytest.mark.parametrize("name", [pytest.param("LCMScheduler", marks=pytest.mark.slow), "UniPCMultistepScheduler"])
def test_fused_forwards_follow_each_other_without_waiting(
    name: str, model: LoadedModel, device: PretendedDevice
) -> None:
    jobs = sample_jobs(model.spec, name, 4, 2)
    work, images = fused_work(model, device, jobs)
    assert work.waits == {}
    model.timesteps_on_host = False
    on_device, expected = fused_work(model, device, jobs)
    assert on_device.launches >= work.launches
    assert np.array_equal(images, expected)


def test_a_pipeline_that_joins_timesteps_with_latents_keeps_them_on_the_device(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-check sees it fail, and tries it the other way."""
    prepare = StableDiffusionPipeline.prepare_latents

    def joining(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        latents: torch.Tensor = prepare(self, *args, **kwargs)
        torch.cat([self.scheduler.timesteps, latents.flatten()])
        return latents

    monkeypatch.setattr(StableDiffusionPipeline, "prepare_latents", joining)
    self_check.run_self_check(model, CPU)
    assert not model.timesteps_on_host
    assert model.solo_reason is None


def test_no_scheduler_has_timesteps_on_the_host_where_the_models_own_does_not(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-check runs the model's own, and a job can name another one."""
    monkeypatch.setattr(noise_schedulers, "TIMESTEPS_ON_HOST", TIMESTEPS_ON_HOST - {"DDIMScheduler"})
    self_check.run_self_check(model, CPU)
    assert not model.timesteps_on_host
    assert model.solo_reason is None
