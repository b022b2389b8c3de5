"""What is kept for checkpoints takes no memory of the device, and is never what the pipeline has changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler
from harness.engine import DIFFUSERS_AND_NUMPY

from bench.common.live_tensors import live_bytes
from worker.engine.checkpoints.checkpoint import Checkpoint
from worker.engine.checkpoints.task_record import TaskRecord, record_steps
from worker.engine.checkpoints.trees import NotStorable
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ModuleProxy, shared_methods_of

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY)

CPU = torch.device("cpu")
STEPS, SHAPE = 6, (1, 4, 9, 9)
OwnCode = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    with torch.no_grad():
        yield
    torch.set_grad_enabled(True)


def keeps(_at: int, sample: torch.Tensor, _predicted: torch.Tensor) -> torch.Tensor:
    return sample


def replaces(_at: int, sample: torch.Tensor, _predicted: torch.Tensor) -> torch.Tensor:
    return sample * 1.01


def changes(_at: int, sample: torch.Tensor, _predicted: torch.Tensor) -> torch.Tensor:
    return sample.mul_(1.01)


def changes_a_part(_at: int, sample: torch.Tensor, _predicted: torch.Tensor) -> torch.Tensor:
    sample[:, :, :3] *= 0.25
    return sample.view(SHAPE)


def changes_later(at: int, sample: torch.Tensor, _predicted: torch.Tensor) -> torch.Tensor:
    return sample.mul_(1.01) if at >= 2 else sample


class Denoiser(torch.nn.Module):
    def forward(self, sample: torch.Tensor, time: Any) -> tuple[torch.Tensor]:
        return (torch.sin(sample) + float(time) / 1000,)


@dataclass
class Progress:
    step: int = 0
    total: int = STEPS
    loop_start: int = 0
    loop_steps: int = STEPS


class Image:
    """An image task whose pipeline makes of each step's output, the sample and the predicted image, the next sample."""

    def __init__(self, own_code: OwnCode, checkpoint: Checkpoint | None = None, *, recorded: bool = True) -> None:
        denoiser = Denoiser()
        proxy: Any = ModuleProxy(denoiser, shared_methods_of("unet", denoiser), CPU, torch.float32)
        self._own_code = own_code
        self.progress = Progress()
        self.record = TaskRecord(CPU, self.progress, checkpoint)
        self.task = ImageTask(lambda: self._body(proxy), record=self.record if recorded else None)

    def _body(self, unet: Any) -> torch.Tensor:
        torch.manual_seed(6)
        scheduler: Any = EulerDiscreteScheduler()
        scheduler.set_timesteps(STEPS)
        record_steps(scheduler)
        sample = torch.randn(SHAPE)
        for at, time in enumerate(scheduler.timesteps):
            prediction = unet(scheduler.scale_model_input(sample, time), time)[0]
            sample = self._own_code(at, *scheduler.step(prediction, time, sample, return_dict=False))
            self.progress.step += 1
        return sample

    def run(self, at_call: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Return the last sample; `at_call` runs between the forwards, once after each step but the last."""
        self.task.start(CPU)
        while (call := self.task.parked_call) is not None:
            if self.progress.step:
                at_call()
            self.task.resume(CPU, call.run())
        assert self.task.error is None
        last: torch.Tensor = self.task.result
        return last

    def take(self) -> Checkpoint | str | None:
        try:
            return self.record.take()
        except NotStorable as error:
            return str(error)


def live_samples(image: Image) -> list[int]:
    """Return how many tensors of a sample's size there are after each step."""
    sizes: list[int] = []
    count = torch.Size(SHAPE).numel()
    image.run(lambda: sizes.append(live_bytes(lambda tensor: tensor.numel() == count)))
    return [size // (4 * count) for size in sizes]


@pytest.mark.parametrize(("own_code", "copies"), [(keeps, 0), (replaces, 1), (changes, 1)])
def test_between_forwards_there_are_the_pipelines_tensors_and_copies_on_the_host(
    own_code: OwnCode, copies: int
) -> None:
    """A copy on the host takes the place of a sample that the pipeline has no longer, or has changed."""
    without = live_samples(Image(own_code, recorded=False))
    assert live_samples(Image(own_code)) == [count + copies for count in without]


@pytest.mark.parametrize("own_code", [keeps, replaces, changes, changes_a_part])
@pytest.mark.parametrize("stop", range(1, STEPS))
def test_an_image_continues_bit_for_bit_whatever_its_pipeline_does_with_samples(own_code: OwnCode, stop: int) -> None:
    image, taken = Image(own_code), list[Checkpoint | str | None]()
    expected = image.run(lambda: taken.append(image.take()))
    checkpoint = taken[stop - 1]
    assert isinstance(checkpoint, Checkpoint)
    assert torch.equal(Image(own_code, checkpoint).run(), expected)


def test_a_sample_that_was_changed_before_it_was_copied_is_not_saved() -> None:
    """The first change of a pipeline that begins to change samples late is not foreseen; the next ones are."""
    image, taken = Image(changes_later), list[Checkpoint | str | None]()
    expected = image.run(lambda: taken.append(image.take()))
    assert taken[2] == "a step's output that its pipeline has changed in place"
    checkpoints = [one for one in taken if isinstance(one, Checkpoint)]
    assert [one.step for one in checkpoints] == [1, 2, 4, 5]
    assert all(torch.equal(Image(changes_later, one).run(), expected) for one in checkpoints)


def test_a_checkpoint_has_the_predicted_image_only_if_the_pipeline_keeps_it() -> None:
    kept: list[torch.Tensor] = []

    def keeps_predicted(at: int, sample: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        mixed = sample + 0.1 * kept[-1] if at == STEPS - 1 else sample
        kept[:] = [predicted]
        return mixed

    for own_code, tensors in ((keeps, 1), (keeps_predicted, 2)):
        kept.clear()
        image, taken = Image(own_code), list[Checkpoint | str | None]()
        expected = image.run(lambda: taken.append(image.take()))  # noqa: B023  # it runs in this turn
        checkpoint = taken[-1]
        assert isinstance(checkpoint, Checkpoint)
        assert len([name for name in checkpoint.tensors if name.startswith("output.")]) == tensors
        kept.clear()
        assert torch.equal(Image(own_code, checkpoint).run(), expected)


def live_tensors() -> int:
    """Return how many tensors of a sample's size are live."""
    count = torch.Size(SHAPE).numel()
    return live_bytes(lambda tensor: tensor.numel() == count) // (4 * count)


def test_an_image_that_is_given_up_holds_no_tensor_of_its_steps() -> None:
    """As a candidate that is dropped: its job goes on."""
    image = Image(keeps)
    image.task.start(CPU)
    for _ in range(3):
        assert image.task.parked_call is not None
        image.task.resume(CPU, image.task.parked_call.run())
    assert live_tensors() > 0
    image.task.abort()
    assert live_tensors() == 0
    assert image.record.resumed_steps == 0


def test_an_image_that_has_ended_keeps_one_copy_of_its_last_sample_for_checkpoints_of_its_job() -> None:
    image = Image(keeps)
    expected = image.run()
    image.record.end()
    image.task.result = None
    assert live_tensors() == 2, "the copy, and what is compared here"
    checkpoint = image.take()
    assert isinstance(checkpoint, Checkpoint)
    assert (checkpoint.step, len(checkpoint.state["schedulers"])) == (STEPS, 1)
    assert torch.equal(Image(keeps, checkpoint).run(), expected)
