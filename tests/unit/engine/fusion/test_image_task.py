"""Image tasks and fused calls: what greenlets share, what each keeps, and how failures are isolated."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from shared.architectures.registry import ARCHITECTURES
from shared.architectures.stacking_rules import Argument, Kind, StackingRules
from shared.errors import InferenceFailed, JobError, OutOfMemory
from worker.engine.fusion.fused_call import FusedCall
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ModuleProxy, ParkedCall, SharedMethod, shared_methods_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    """Image tasks disable gradients for their thread, which is also the thread of other tests."""
    with torch.no_grad():
        yield
    torch.set_grad_enabled(True)


class Doubler(torch.nn.Module):
    """A module with a stacking rule, which records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.autocast: list[bool] = []
        self.fails: Callable[[torch.Tensor], None] = lambda _x: None

    def forward(self, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        self.rows.append(x.shape[0])
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        self.fails(x)
        return factor * x


@pytest.fixture
def doubler(monkeypatch: pytest.MonkeyPatch) -> Doubler:
    rules = {**ARCHITECTURES, "Doubler": {"forward": StackingRules("x", {"x": Argument(Kind.STACKED)})}}
    monkeypatch.setattr("worker.engine.fusion.module_proxy.ARCHITECTURES", rules)
    return Doubler()


@pytest.fixture
def proxy(doubler: Doubler) -> ModuleProxy:
    return ModuleProxy(doubler, shared_methods_of("unet", doubler), CPU, torch.float32)


def start(bodies: Sequence[Callable[[], Any]]) -> list[ImageTask]:
    tasks = [ImageTask(body) for body in bodies]
    for task in tasks:
        task.start(CPU)
    return tasks


def run_parked(tasks: Sequence[ImageTask]) -> FusedCall:
    """Run all parked calls in one fused call and resume their tasks."""
    parked = [task for task in tasks if task.parked_call is not None]
    fused = FusedCall([task.parked_call for task in parked if task.parked_call is not None])
    for task, outcome in zip(parked, fused.run(), strict=True):
        task.resume(CPU, outcome)
    return fused


def test_each_task_resumes_with_its_rows_of_the_fused_forward(doubler: Doubler, proxy: ModuleProxy) -> None:
    """Two forwards for three tasks with two calls each."""
    tasks = start([lambda at=at: proxy(proxy(torch.full((1, 2), float(at)))) for at in range(3)])
    run_parked(tasks)
    run_parked(tasks)
    assert doubler.rows == [3, 3]
    assert [task.result.tolist() for task in tasks] == [[[0, 0]], [[4, 4]], [[8, 8]]]
    assert all(task.done for task in tasks)


def test_a_proxy_has_its_modules_class_and_cannot_be_moved(doubler: Doubler, proxy: ModuleProxy) -> None:
    """Pipelines check the class, and cast modules."""
    assert isinstance(proxy, Doubler)
    assert proxy.to(torch.float16).half() is proxy
    assert proxy.rows is doubler.rows
    assert list(proxy.modules()) == []
    assert proxy(torch.ones(1)).tolist() == [2], "outside a task it calls the module"


def test_arguments_are_named_and_defaults_dropped(doubler: Doubler) -> None:
    """Positional and keyword arguments have the same batch key."""
    method = SharedMethod("unet", "forward", doubler)
    x = torch.ones(1, 2)
    assert ParkedCall(method, (x, 2.0), {}).batch_key != ParkedCall(method, (x, 3.0), {}).batch_key
    assert (
        ParkedCall(method, (x,), {"factor": 3.0}).batch_key == ParkedCall(method, (), {"x": x, "factor": 3.0}).batch_key
    )


def test_each_task_has_its_own_global_generator_state(proxy: ModuleProxy) -> None:
    """A pipeline that seeds the global generator draws the same numbers, also if others draw in between."""

    def drawn(seed: int) -> list[float]:
        torch.manual_seed(seed)
        before = torch.rand(2)
        proxy(torch.ones(1, 2))
        return [*before.tolist(), *torch.rand(2).tolist()]

    def solo(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [*torch.rand(2).tolist(), *torch.rand(2).tolist()]

    tasks = start([lambda: drawn(1), lambda: drawn(2)])
    torch.rand(1)
    run_parked(tasks)
    assert [task.result for task in tasks] == [solo(1), solo(2)]


def test_autocast_of_one_task_does_not_leak_into_another(doubler: Doubler, proxy: ModuleProxy) -> None:
    """Autocast belongs to the thread: it is reset at each switch, and set for that task's forwards."""

    def cast() -> bool:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            proxy(torch.ones(1, 2))
            return torch.is_autocast_enabled("cpu")

    def plain() -> bool:
        proxy(torch.ones(1, 2))
        return torch.is_autocast_enabled("cpu")

    tasks = start([cast, plain])
    first, second = (task.parked_call for task in tasks)
    assert first is not None
    assert second is not None
    assert first.batch_key != second.batch_key
    assert not torch.is_autocast_enabled("cpu")
    for task in tasks:
        run_parked([task])
    assert doubler.autocast == [True, False]
    assert [task.result for task in tasks] == [True, False]
    assert not torch.is_autocast_enabled("cpu")


def test_each_task_keeps_the_context_variables_of_its_start(proxy: ModuleProxy) -> None:
    """By default, greenlets start with empty context variables."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    def body(name: str) -> str:
        before = variable.get()
        variable.set(name)
        proxy(torch.ones(1, 1))
        return f"{before} {variable.get()}"

    token = variable.set("engine")
    tasks = start([lambda name=name: body(name) for name in ("one", "two")])
    run_parked(tasks)
    assert [task.result for task in tasks] == ["engine one", "engine two"]
    assert variable.get() == "engine"
    variable.reset(token)


@pytest.mark.parametrize("position", range(8))
def test_a_failure_is_isolated_to_the_call_that_causes_it(doubler: Doubler, proxy: ModuleProxy, position: int) -> None:
    """The seven others succeed, in at most 2 log2(8) + 1 forwards."""

    def fail_on_99(x: torch.Tensor) -> None:
        if bool((x == 99).any()):
            raise ValueError("99")

    doubler.fails = fail_on_99
    values = [99.0 if at == position else float(at) for at in range(8)]
    tasks = start([lambda value=value: proxy(torch.full((1, 1), value)).item() for value in values])
    fused = run_parked(tasks)
    assert [task.result for task in tasks if task.error is None] == [2 * v for v in values if v != 99]
    assert isinstance(tasks[position].error, InferenceFailed)
    assert len(doubler.rows) <= 7
    assert fused.failed_forwards == 4
    assert fused.calls_tried is None


def test_out_of_memory_frees_the_activations_of_the_failed_forward(doubler: Doubler, proxy: ModuleProxy) -> None:
    """A kept traceback would hold them."""
    alive: list[bool] = []
    held: list[Any] = []

    class Activation:
        def __del__(self) -> None:
            held.clear()

    def fail_above_one_row(x: torch.Tensor) -> None:
        if x.shape[0] > 1:
            activation = Activation()
            held.append(id(activation))
            raise torch.OutOfMemoryError("injected")

    doubler.fails = fail_above_one_row
    tasks = start([lambda: proxy(torch.ones(1, 1)) for _ in range(2)])
    fused = FusedCall(
        [task.parked_call for task in tasks if task.parked_call is not None],
        free_memory=lambda _failed, _next_calls: alive.append(bool(held)),
    )
    assert [float(outcome) for outcome in fused.run()] == [2, 2]
    assert alive == [False]
    assert fused.calls_tried == 1
    for task in tasks:
        task.abort()


def test_padded_forwards_are_filled_with_copies(doubler: Doubler, proxy: ModuleProxy) -> None:
    """Every forward has the same number of calls, and each call has its own position."""
    seen: list[list[float]] = []
    doubler.fails = lambda x: seen.append(x[:, 0].tolist())
    tasks = start([lambda value=value: proxy(torch.full((1, 1), value)) for value in (1.0, 2.0, 3.0)])
    calls = [task.parked_call for task in tasks if task.parked_call is not None]
    assert [float(row) for row in FusedCall(calls, pad_to=4, positions=[2, 0, 1]).run()] == [2, 4, 6]
    assert [float(row) for row in FusedCall(calls[1:2], pad_to=4, positions=[3]).run()] == [4]
    assert seen == [[2, 3, 1, 1], [2, 2, 2, 2]]
    for task in tasks:
        task.abort()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(ValueError("odd"), InferenceFailed), (OutOfMemory("full"), OutOfMemory), (torch.OutOfMemoryError(), OutOfMemory)],
)
def test_an_error_in_a_tasks_own_code_becomes_its_error(raised: Exception, expected: type[JobError]) -> None:
    """The error is kept without its traceback."""

    def body() -> None:
        raise raised

    (task,) = start([body])
    assert task.done
    assert type(task.error) is expected
    assert task.error is not None
    assert task.error.__traceback__ is None


def test_an_aborted_task_unwinds_without_an_error(proxy: ModuleProxy) -> None:
    """Pipelines that catch every Exception do not catch the abort."""
    unwound = []

    def body() -> None:
        try:
            proxy(torch.ones(1, 1))
        except Exception:
            unwound.append("caught")
        finally:
            unwound.append("finally")

    (task,) = start([body])
    task.abort()
    assert unwound == ["finally"]
    assert task.done
    assert task.error is None


def test_a_task_that_is_aborted_before_its_start_is_done() -> None:
    task = ImageTask(lambda: pytest.fail("it runs"))
    task.abort()
    assert (task.done, task.started, task.error) == (True, False, None)


def test_a_lost_device_is_not_the_error_of_a_task(proxy: ModuleProxy, doubler: Doubler) -> None:
    """It ends the engine's thread."""

    def lose_device(_x: torch.Tensor) -> None:
        raise torch.AcceleratorError("injected")

    doubler.fails = lose_device
    (task,) = start([lambda: proxy(torch.ones(1, 1))])
    assert task.parked_call is not None
    with pytest.raises(torch.AcceleratorError):
        FusedCall([task.parked_call]).run()
    task.abort()


class Decoder(torch.nn.Module):
    """A decoder that records whether it ran in inference mode."""

    lean = False

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        self.lean = torch.is_inference_mode_enabled()
        return 2 * z


@pytest.mark.parametrize(("shape", "lean"), [((1, 4, 2, 2), True), ((1, 4, 3, 2, 2), False)])
def test_only_images_are_decoded_in_inference_mode(shape: tuple[int, ...], lean: bool) -> None:
    """Outputs of inference mode are copied, so that they can be changed in place; a video is not copied."""
    decoder = Decoder()
    methods = shared_methods_of("vae", decoder, lean=True)
    for decoded in (methods["decode"].run(torch.ones(shape)), methods["decode"].run(z=torch.ones(shape))):
        assert decoder.lean is lean
        decoded += 1
        assert torch.equal(decoded, torch.full(shape, 3.0))


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "message"), [(Unprintable(), "Unprintable: "), (ValueError("\ud800"), "ValueError: ")]
)
def test_an_error_without_a_text_that_can_be_sent_fails_its_task(
    error: Exception, message: str, doubler: Doubler, proxy: ModuleProxy
) -> None:
    """A model can raise its own classes, and quote anything."""

    def fails(_x: torch.Tensor) -> None:
        raise error

    doubler.fails = fails
    (task,) = start([lambda: proxy(torch.ones(1, 2))])
    run_parked([task])
    assert isinstance(task.error, InferenceFailed)
    assert task.error.message.startswith(message)
    task.error.message.encode()
