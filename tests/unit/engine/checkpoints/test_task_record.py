"""An image task continues from its checkpoint without computing earlier steps, or begins anew if it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from harness.engine import DIFFUSERS_AND_NUMPY

from worker.engine.checkpoints.checkpoint import Checkpoint
from worker.engine.checkpoints.replay import ReplayFailed
from worker.engine.checkpoints.task_record import TaskRecord, record_steps
from worker.engine.checkpoints.trees import NotStorable
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ModuleProxy, shared_methods_of

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    with torch.no_grad():
        yield
    torch.set_grad_enabled(True)


@dataclass
class Progress:
    step: int = 0
    total: int = 0
    loop_start: int = 0
    loop_steps: int = 0


class Denoiser(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, sample: torch.Tensor, time: Any) -> tuple[torch.Tensor]:
        self.calls += 1
        return (torch.sin(sample) + float(time) / 1000 + torch.rand(1),)


@dataclass
class Case:
    """A pipeline's code: two loops over steps of a noise scheduler, of which the second uses the first's end.

    With `together` there is one loop, in which two schedulers step. The denoiser and the scheduler draw noise, and the
    code changes what a step returned.
    """

    denoiser: Denoiser = field(default_factory=Denoiser)
    together: bool = False
    steps: int = 4

    def run(self, checkpoint: Checkpoint | None = None, stop: int | None = None) -> Any:
        """Return the outcome, or the checkpoint after step `stop`, which can be the last one."""
        methods = shared_methods_of("unet", self.denoiser)
        proxy = ModuleProxy(self.denoiser, methods, CPU, torch.float32)
        progress = Progress(total=self.steps if self.together else 2 * self.steps)
        record = TaskRecord(CPU, progress, checkpoint)
        task = ImageTask(lambda: self._body(proxy, progress, record), record=record)
        task.start(CPU)
        while task.parked_call is not None:
            if stop is not None and progress.step >= stop:
                taken = record.take()
                task.abort()
                return taken
            task.resume(CPU, task.parked_call.run())
        assert task.error is None
        return (task.result, record.resumed_steps) if stop is None else record.take()

    def _body(self, unet: Any, progress: Progress, record: TaskRecord) -> tuple[torch.Tensor, torch.Tensor]:
        progress.loop_steps = self.steps
        generator = torch.Generator().manual_seed(5)
        record.use_generator(generator)
        torch.manual_seed(6)
        scheduler: Any = DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++")
        second: Any = FlowMatchEulerDiscreteScheduler()
        for one in (scheduler, second):
            one.set_timesteps(self.steps)
            record_steps(one)
        picture, sound = torch.randn(1, 2, generator=generator), torch.randn(1, 2)
        for at, time in enumerate(scheduler.timesteps):
            picture = scheduler.step(unet(picture, time)[0], time, picture, generator)[0]
            picture *= 1.01
            if self.together:
                time = second.timesteps[at]
                sound = second.step(unet(sound, time)[0], time, sound)[0]
            progress.step += 1
        if self.together:
            return picture, sound
        progress.loop_start = progress.step
        scheduler.set_timesteps(self.steps)
        for time in scheduler.timesteps:
            sound = scheduler.step(unet(sound + picture, time)[0], time, sound, generator)[0]
            progress.step += 1
        return picture, sound


@pytest.mark.parametrize(
    ("together", "stop"), [(True, 1), (True, 2), (True, 3), (False, 1), (False, 3), (False, 4), (False, 5), (False, 7)]
)
def test_an_image_continues_with_the_states_of_all_its_schedulers(together: bool, stop: int) -> None:
    """Of an earlier loop only the last step counts, which the second loop goes on from."""
    expected, none = Case(together=together).run()
    checkpoint = Case(together=together).run(stop=stop)
    again = Case(together=together)
    found, resumed = again.run(checkpoint)
    assert (none, resumed) == (0, stop)
    assert again.denoiser.calls == (8 - 2 * stop if together else 8 - stop)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_of_an_image_that_has_continued_is_like_any_other() -> None:
    expected, _ = Case().run()
    first = Case().run(stop=2)
    second = Case().run(first, stop=6)
    found, resumed = Case().run(second)
    assert resumed == 6
    assert all(map(torch.equal, expected, found))


def test_an_image_that_was_only_to_be_decoded_computes_no_step_again() -> None:
    expected, _ = Case().run()
    again = Case()
    found, resumed = again.run(Case().run(stop=8))
    assert (again.denoiser.calls, resumed) == (0, 8)
    assert all(map(torch.equal, expected, found))


def test_there_is_no_checkpoint_before_the_first_step() -> None:
    assert Case().run(stop=0) is None


def test_a_checkpoint_does_not_change_with_the_image() -> None:
    """The image goes on after it, and changes tensors in place."""
    case = Case()
    proxy = ModuleProxy(case.denoiser, shared_methods_of("unet", case.denoiser), CPU, torch.float32)
    progress = Progress()
    record = TaskRecord(CPU, progress)
    task = ImageTask(lambda: case._body(proxy, progress, record), record=record)
    task.start(CPU)
    task.resume(CPU, task.parked_call.run())  # type: ignore[union-attr]
    taken = record.take()
    assert taken is not None
    before = {name: tensor.clone() for name, tensor in taken.tensors.items()}
    calls = len(taken.state["calls"])
    while task.parked_call is not None:
        task.resume(CPU, task.parked_call.run())
    assert all(torch.equal(before[name], tensor) for name, tensor in taken.tensors.items())
    assert len(taken.state["calls"]) == calls


def test_a_call_that_does_not_do_the_same_does_not_continue() -> None:
    checkpoint = Case().run(stop=2)
    record = TaskRecord(CPU, Progress(), checkpoint)
    assert record.replaying
    with pytest.raises(ReplayFailed, match=r"is of vae\.forward, and was of unet\.forward"):
        record.answer("vae.forward", lambda: None)
    record.restart()
    assert not record.replaying
    assert torch.equal(record.answer("vae.forward", lambda: torch.ones(1)), torch.ones(1))


def test_an_output_that_is_not_storable_makes_the_image_one_without_checkpoints() -> None:
    record = TaskRecord(CPU, Progress())
    scheduler = FlowMatchEulerDiscreteScheduler()
    record.answer("unet.forward", object)
    record.step(scheduler, lambda: (torch.ones(1),))
    with pytest.raises(NotStorable, match="an output of class object"):
        record.take()


def test_steps_outside_of_image_tasks_are_not_recorded() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(2)
    record_steps(scheduler)
    assert type(scheduler) is FlowMatchEulerDiscreteScheduler, "some pipelines compare the type"
    sample = torch.ones(1)
    assert scheduler.step(sample, scheduler.timesteps[0], sample)[0].shape == (1,)


def test_a_step_that_calls_that_of_its_base_is_one_step() -> None:
    class Halved(FlowMatchEulerDiscreteScheduler):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            return tuple(0.5 * one for one in super().step(*args, **kwargs, return_dict=False))

    base, derived = FlowMatchEulerDiscreteScheduler(), Halved()
    record = TaskRecord(CPU, Progress())

    def body() -> Any:
        for one in (base, derived):
            one.set_timesteps(2)
            record_steps(one)
        sample = torch.ones(1)
        return [one.step(sample, one.timesteps[0], sample)[0] for one in (base, derived)]

    task = ImageTask(body, record=record)
    task.start(CPU)
    assert (task.error, len(task.result)) == (None, 2)
    assert len(record._steps) == 2
