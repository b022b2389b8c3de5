"""The probe measures a model with the engine, and workers start from its times."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import pytest
from diffusers import DDIMScheduler
from harness.engine import EngineHarness, a_job, a_spec
from rich.console import Console

from shared.config import models_file
from shared.config.request_limits import Limits
from shared.config.settings import Settings
from shared.config.step_schedules import CacheLevel, StepCaching, StepSchedule
from shared.errors import ModelUnavailable
from shared.queue import Queue
from shared.tasks import Task
from worker import probe as command
from worker.cost_curves import CostCurves
from worker.engine.protocol import ForwardDone
from worker.probe import Measured, Probed, probe

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
ON_CPU = Settings(device="cpu", torch_threads=1)


def test_a_model_is_measured_at_each_count(tiny_models: Path) -> None:
    spec = a_spec(tiny_models / "sd", max_batch=3, limits=Limits(max_images=1, multiple_of=16))
    found = probe(spec, ON_CPU)
    assert (found.spec.id, found.device, found.shape) == ("tiny", "cpu", "64x64")
    assert list(found.seconds) == [1, 2, 3]
    assert min(found.seconds.values()) > 0
    assert found.row_bytes is None  # a CPU's memory is not counted


def test_an_image_to_image_model_of_few_steps_is_measured(tiny_models: Path) -> None:
    """One forward per job is too few samples, so the jobs are repeated."""
    limits = Limits(max_images=1, max_steps=1, multiple_of=16)
    spec = a_spec(tiny_models / "sd", tasks=(Task.IMAGE_TO_IMAGE,), max_batch=1, limits=limits)
    assert list(probe(spec, ON_CPU).seconds) == [1]


def test_the_error_names_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="tiny"):
        probe(a_spec(tmp_path), ON_CPU)


def test_step_caching_is_calibrated_against_jobs_that_skip_nothing(
    tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The schedules go into the models file, which can be read after that; a model for few steps has none."""
    few, many = (StepSchedule(every=every, order="reuse") for every in (6, 2))
    monkeypatch.setattr("worker.engine.step_calibration.CANDIDATES", (few, many))
    monkeypatch.setattr("worker.engine.step_calibration.STEP_COUNTS", (12,))
    monkeypatch.setattr("worker.engine.step_calibration.LEAST_PSNR", {CacheLevel.STRONG: 1.0})
    (tmp_path / "sd").symlink_to(tiny_models / "sd")
    models = tmp_path / "models.toml"
    sizes = "[model.defaults]\nwidth = 64\nheight = 64\nsteps = 4\n"
    model = '[[model]]\nid = "{}"\nsource = "sd"\n{}' + sizes + "[model.limits]\nmax_steps = {}\n"
    models.write_text(model.format("turbo", "", 8) + model.format("tiny", "", 20))
    asked = argparse.Namespace(model=None, keep=True, prompt=["a lighthouse"])
    assert command.calibrate_steps(asked, ON_CPU.model_copy(update={"models": models}), Console(width=200)) == 1
    output = capsys.readouterr().out
    assert "turbo" in output
    assert "no schedule is good enough for light" in output
    turbo, tiny = models_file.load(models)
    assert tiny.step_cache.strong == few
    assert tiny.step_cache.allowed == ("strong", "schedule")
    assert turbo.step_cache == StepCaching()


def options(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"model": None, "plot": None, "keep": True, **changes})


def test_a_failed_model_does_not_hide_the_others(
    tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good").symlink_to(tiny_models / "sd")
    (tmp_path / "bad").mkdir()
    models = tmp_path / "models.toml"
    models.write_text(
        '[[model]]\nid = "bad"\nsource = "bad"\n'
        '[[model]]\nid = "good"\nsource = "good"\nmax_batch = 2\n'
        "[model.defaults]\nwidth = 64\nheight = 64\n[model.limits]\nmax_images = 1\n"
    )
    configured = ON_CPU.model_copy(update={"models": models})
    plot = tmp_path / "curves.svg"
    assert command.run(options(keep=False, plot=plot), configured, Console(width=120)) == 1
    output = capsys.readouterr().out
    assert "bad" in output
    assert "64x64" in output
    assert plot.read_text().startswith("<svg")


async def test_workers_start_from_the_stored_times(queue: Queue) -> None:
    """Without them a worker takes all rows as efficient until it has measured them."""
    forward = ForwardDone("tiny", 1, 1, 1.0, "cpu", "64x64", "job_1:1")
    one = Probed(a_spec(Path("none")), "cpu", "64x64", (Measured(1, 1.0, None), Measured(2, 2.0, None)))
    await command.save([one], queue.client.settings)
    curves = CostCurves()
    curves.add("s", forward)
    assert curves.rows("s", 8) == 8
    await curves.load(queue)
    assert curves.rows("s", 8) == 1


def test_a_forward_reports_the_own_code_after_it(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise schedulers run image by image, so they lengthen the steps of a full batch most."""
    run, slow_s = DDIMScheduler.step, 0.02

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(slow_s)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(DDIMScheduler, "step", step)
    jobs = [a_job(name, scheduler="DDIMScheduler") for name in ("one", "two", "three")]
    spec = a_spec(tiny_models / "sd", schedulers=("DDIMScheduler",))
    first, *others = EngineHarness(spec).run(*jobs).forwards
    assert first.own_code_s == 0
    assert [forward.rows for forward in others] == [3, 3, 3]
    assert all(forward.own_code_s >= 3 * slow_s for forward in others)
    assert all(forward.step_s == forward.seconds + forward.own_code_s for forward in others)
