"""What an image task changes in a shared module is there for its own code and calls only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shared.architectures.registry import ARCHITECTURES
from shared.architectures.stacking_rules import Argument, Kind, StackingRules
from worker.engine.fusion.fused_call import FusedCall
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ModuleProxy, shared_methods_of
from worker.engine.fusion.private_changes import ModuleWatch
from worker.engine.pipelines.text_cache import tokens_key

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    """Image tasks disable gradients for their thread, which is also the thread of other tests."""
    with torch.no_grad():
        yield
    torch.set_grad_enabled(True)


class Encoder(torch.nn.Module):
    """Adds its processor's number in a part of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.part = torch.nn.Identity()
        self.part.processor = 1
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(x.shape[0])
        output: torch.Tensor = self.part(x) + self.part.processor
        return output


class Shared:
    """An encoder that tasks share, with a watch of its parts."""

    def __init__(self) -> None:
        self.encoder = Encoder()
        self.proxy = ModuleProxy(self.encoder, shared_methods_of("text_encoder", self.encoder), CPU, torch.float32)
        self.watch = ModuleWatch({"text_encoder": self.encoder})

    def start(self, *bodies: Callable[[], Any]) -> list[ImageTask]:
        tasks = [ImageTask(body, watch=self.watch) for body in bodies]
        for task in tasks:
            task.start(CPU)
        return tasks

    def run(self, *bodies: Callable[[], Any]) -> list[Any]:
        """Run tasks to their ends, calls with equal batch keys in one forward; return their results."""
        tasks = self.start(*bodies)
        while parked := [task for task in tasks if task.parked_call is not None]:
            calls = [task.parked_call for task in parked if task.parked_call is not None]
            batch = [at for at, call in enumerate(calls) if call.batch_key == calls[0].batch_key]
            outputs = FusedCall([calls[at] for at in batch]).run()
            for at, output in zip(batch, outputs, strict=True):
                parked[at].resume(CPU, output)
        assert [task.error for task in tasks] == [None] * len(tasks)
        return [task.result for task in tasks]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    rules = {**ARCHITECTURES, "Encoder": {"forward": StackingRules("x", {"x": Argument(Kind.STACKED)})}}
    monkeypatch.setattr("worker.engine.fusion.module_proxy.ARCHITECTURES", rules)
    return Shared()


def test_a_replaced_processor_is_that_of_its_task_only(shared: Shared) -> None:
    """As with perturbed attention: set before a call, and restored after it to what was found."""
    part = shared.encoder.part

    def perturbed(number: int) -> list[float]:
        found, part.processor = part.processor, number
        outputs = [shared.proxy(torch.zeros(1, 1)).item() for _ in range(2)]
        assert part.processor == number
        part.processor = found
        return [*outputs, shared.proxy(torch.zeros(1, 1)).item()]

    def plain() -> list[float]:
        return [shared.proxy(torch.zeros(1, 1)).item()]

    results = shared.run(lambda: perturbed(10), plain, lambda: perturbed(20), plain)
    assert results == [[10, 10, 1], [1], [20, 20, 1], [1]]
    assert part.processor == 1
    assert max(shared.encoder.rows) > 1, "calls of tasks without changes share forwards"


def test_a_hook_that_keeps_a_value_sees_the_calls_of_its_task_only(shared: Shared) -> None:
    """JoyImage registers one on its text encoder; with a cached output it would have no value."""

    def captured(value: float) -> float:
        kept = {}

        def keep(_module: Any, _args: Any, output: torch.Tensor) -> None:
            kept["output"] = output

        handle = shared.encoder.part.register_forward_hook(keep)
        try:
            shared.proxy(torch.full((1, 1), value))
        finally:
            handle.remove()
        return kept["output"].item()

    assert shared.run(*(lambda value=value: captured(value) for value in (1.0, 2.0, 3.0))) == [1, 2, 3]
    assert not shared.encoder.part._forward_hooks
    (task,) = shared.start(lambda: captured(1.0))
    assert task.parked_call is not None
    assert tokens_key(task.parked_call) is None
    task.abort()


def test_hooks_without_a_state_do_not_keep_tasks_from_sharing_forwards(shared: Shared) -> None:
    """Qwen-Image 2.1 registers one; a task without it has forwards of its own."""

    def hooked(value: float) -> float:
        with shared.encoder.part.register_forward_hook(lambda _module, args, _output: 2 * args[0]):
            return shared.proxy(torch.full((1, 1), value)).item()

    def plain() -> float:
        return shared.proxy(torch.full((1, 1), 5.0)).item()

    assert shared.run(lambda: hooked(1.0), plain, lambda: hooked(2.0)) == [3, 6, 5]
    assert shared.encoder.rows == [2, 1]


def test_an_aborted_task_leaves_no_changes(shared: Shared) -> None:
    """Its own code need not restore them."""

    def perturbed() -> None:
        shared.encoder.part.processor = 10
        shared.proxy(torch.zeros(1, 1))

    (task,) = shared.start(perturbed)
    task.abort()
    assert shared.encoder.part.processor == 1


def test_after_the_check_only_changed_parts_are_watched(shared: Shared) -> None:
    """A pipeline that changes nothing costs nothing at its switches."""
    shared.run(lambda: shared.proxy(torch.zeros(1, 1)))
    shared.watch.settle()
    assert shared.watch.idle
