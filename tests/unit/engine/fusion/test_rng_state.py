"""Modules that draw from the global generators: each call does so from the state of its own image task."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from worker.engine.fusion.fused_call import FusedCall
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ModuleProxy, shared_methods_of

CPU = torch.device("cpu")


class NoisyDecoder(torch.nn.Module):
    """A decoder that injects noise, like the VAE of LTX; it can fail after the draw."""

    fails = False

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(2)
        if self.fails:
            raise torch.OutOfMemoryError
        return z + noise


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    """Image tasks disable gradients for their thread, which is also the thread of other tests."""
    yield
    torch.set_grad_enabled(True)


def drawn_by_torch(seed: int) -> list[float]:
    torch.manual_seed(seed)
    return [number for _ in range(4) for number in torch.rand(2).tolist()]


@pytest.mark.parametrize("fails", [False, True])
def test_a_module_draws_the_same_with_and_without_batch_mates(fails: bool) -> None:
    """Also at another try after memory ran out. What a pipeline draws afterwards follows."""
    decoder = NoisyDecoder()
    proxy = ModuleProxy(decoder, shared_methods_of("vae", decoder), CPU, torch.float32)

    def body(seed: int) -> list[float]:
        torch.manual_seed(seed)
        draws = [tensor for _ in range(2) for tensor in (torch.rand(2), proxy.decode(torch.zeros(2)))]
        return [number for tensor in draws for number in tensor.tolist()]

    def free_memory(_failed: int, _next_calls: int) -> None:
        decoder.fails = False

    tasks = [ImageTask(lambda seed=seed: body(seed)) for seed in (1, 2)]  # type: ignore[misc]
    for task in tasks:
        task.start(CPU)
    while not all(task.done for task in tasks):
        for task in tasks:
            assert task.parked_call is not None
            decoder.fails = fails
            (output,) = FusedCall([task.parked_call], free_memory=free_memory).run()
            task.resume(CPU, output)
    assert [task.result for task in tasks] == [drawn_by_torch(1), drawn_by_torch(2)]


def test_tasks_of_two_engines_draw_what_they_draw_alone_and_the_program_too() -> None:
    """A program can have several engines, each with a thread of its own, and draws from the same generators."""
    others: list[ImageTask] = []

    def other_engine() -> None:
        others.append(ImageTask(lambda: drawn_by_torch(2)))
        others[0].start(CPU)

    thread = threading.Thread(target=other_engine)

    def body() -> list[float]:
        torch.manual_seed(1)
        first = torch.rand(2).tolist()
        thread.start()
        thread.join(0.2)  # if nothing holds it up, it has drawn by then
        return [*first, *(number for _ in range(3) for number in torch.rand(2).tolist())]

    torch.manual_seed(3)
    task = ImageTask(body)
    task.start(CPU)
    thread.join()
    of_program = torch.rand(8).tolist()
    assert [task.result, others[0].result, of_program] == [drawn_by_torch(seed) for seed in (1, 2, 3)]
