"""Greenlets that meet at a module: what they share, what stays their own, and how failures are narrowed down."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from shared.errors import InferenceFailed, JobError, OutOfMemory
from worker.engine.fusion.architectures import ARCHITECTURES
from worker.engine.fusion.fused_call import FusedCall
from worker.engine.fusion.image_task import ImageTask
from worker.engine.fusion.module_proxy import ModuleProxy, ParkedCall, SharedMethod, shared_methods_of
from worker.engine.fusion.stacking_rules import Argument, Kind, StackingRules

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def grad_mode() -> Iterator[None]:
    """Pictures turn gradients off for their thread, which here is that of all tests."""
    with torch.no_grad():
        yield
    torch.set_grad_enabled(True)


class Doubler(torch.nn.Module):
    """A module with a rule, that notes how it is called."""

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
    pictures = [ImageTask(body) for body in bodies]
    for picture in pictures:
        picture.start(CPU)
    return pictures


def run_parked(pictures: Sequence[ImageTask]) -> FusedCall:
    """Run all parked calls together and let their pictures go on."""
    parked = [picture for picture in pictures if picture.call is not None]
    execution = FusedCall([picture.call for picture in parked if picture.call is not None])
    for picture, outcome in zip(parked, execution.run(), strict=True):
        picture.resume(CPU, outcome)
    return execution


def test_pictures_meet_and_each_goes_on_with_its_own_rows(doubler: Doubler, proxy: ModuleProxy) -> None:
    """One forward for three, twice."""
    pictures = start([lambda at=at: proxy(proxy(torch.full((1, 2), float(at)))) for at in range(3)])
    run_parked(pictures)
    run_parked(pictures)
    assert doubler.rows == [3, 3]
    assert [picture.result.tolist() for picture in pictures] == [[[0, 0]], [[4, 4]], [[8, 8]]]
    assert all(picture.done for picture in pictures)


def test_a_proxy_passes_for_its_module_and_cannot_be_moved(doubler: Doubler, proxy: ModuleProxy) -> None:
    """Pipelines ask for the class, and cast what others use."""
    assert isinstance(proxy, Doubler)
    assert proxy.to(torch.float16).half() is proxy
    assert proxy.rows is doubler.rows
    assert list(proxy.modules()) == []
    assert proxy(torch.ones(1)).tolist() == [2], "outside a picture it is the module"


def test_arguments_are_named_and_defaults_dropped(doubler: Doubler) -> None:
    """The same call written in two ways fits itself."""
    point = SharedMethod("unet", "forward", doubler)
    x = torch.ones(1, 2)
    assert ParkedCall(point, (x, 2.0), {}).batch_key != ParkedCall(point, (x, 3.0), {}).batch_key
    assert (
        ParkedCall(point, (x,), {"factor": 3.0}).batch_key == ParkedCall(point, (), {"x": x, "factor": 3.0}).batch_key
    )


def test_the_global_generator_of_one_picture_is_not_that_of_another(proxy: ModuleProxy) -> None:
    """A pipeline that seeds it draws the same numbers whoever draws in between."""

    def drawn(seed: int) -> list[float]:
        torch.manual_seed(seed)
        before = torch.rand(2)
        proxy(torch.ones(1, 2))
        return [*before.tolist(), *torch.rand(2).tolist()]

    def solo(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [*torch.rand(2).tolist(), *torch.rand(2).tolist()]

    pictures = start([lambda: drawn(1), lambda: drawn(2)])
    torch.rand(1)
    run_parked(pictures)
    assert [picture.result for picture in pictures] == [solo(1), solo(2)]


def test_autocast_of_one_picture_does_not_leak_into_another(doubler: Doubler, proxy: ModuleProxy) -> None:
    """It belongs to the thread: the hub takes it off at each switch, and runs that picture's forward under it."""

    def cast() -> bool:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            proxy(torch.ones(1, 2))
            return torch.is_autocast_enabled("cpu")

    def plain() -> bool:
        proxy(torch.ones(1, 2))
        return torch.is_autocast_enabled("cpu")

    pictures = start([cast, plain])
    first, second = (picture.call for picture in pictures)
    assert first is not None
    assert second is not None
    assert first.batch_key != second.batch_key
    assert not torch.is_autocast_enabled("cpu")
    for picture in pictures:
        run_parked([picture])
    assert doubler.autocast == [True, False]
    assert [picture.result for picture in pictures] == [True, False]
    assert not torch.is_autocast_enabled("cpu")


def test_each_picture_has_the_context_it_started_in(proxy: ModuleProxy) -> None:
    """Greenlets start with empty context variables unless they are given some."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    def body(name: str) -> str:
        before = variable.get()
        variable.set(name)
        proxy(torch.ones(1, 1))
        return f"{before} {variable.get()}"

    token = variable.set("hub")
    pictures = start([lambda name=name: body(name) for name in ("one", "two")])
    run_parked(pictures)
    assert [picture.result for picture in pictures] == ["hub one", "hub two"]
    assert variable.get() == "hub"
    variable.reset(token)


@pytest.mark.parametrize("position", range(8))
def test_a_failure_is_narrowed_down_to_the_call_that_makes_it(
    doubler: Doubler, proxy: ModuleProxy, position: int
) -> None:
    """Seven succeed wherever the eighth stands, in at most 2 log2(8) + 1 forwards."""

    def refuse(x: torch.Tensor) -> None:
        if bool((x == 99).any()):
            raise ValueError("99")

    doubler.fails = refuse
    values = [99.0 if at == position else float(at) for at in range(8)]
    pictures = start([lambda value=value: proxy(torch.full((1, 1), value)).item() for value in values])
    execution = run_parked(pictures)
    assert [picture.result for picture in pictures if picture.error is None] == [2 * v for v in values if v != 99]
    assert isinstance(pictures[position].error, InferenceFailed)
    assert len(doubler.rows) <= 7
    assert execution.retries == 4
    assert execution.fitted is None


def test_out_of_memory_drops_what_the_failed_forward_held(doubler: Doubler, proxy: ModuleProxy) -> None:
    """Nothing of it is alive when memory is freed: the traceback would keep it."""
    alive: list[bool] = []
    held: list[Any] = []

    class Activation:
        def __del__(self) -> None:
            held.clear()

    def scarce(x: torch.Tensor) -> None:
        if x.shape[0] > 1:
            activation = Activation()
            held.append(id(activation))
            raise torch.OutOfMemoryError("injected")

    doubler.fails = scarce
    pictures = start([lambda: proxy(torch.ones(1, 1)) for _ in range(2)])
    execution = FusedCall(
        [picture.call for picture in pictures if picture.call is not None],
        free_memory=lambda _calls, _fits: alive.append(bool(held)),
    )
    assert [float(outcome) for outcome in execution.run()] == [2, 2]
    assert alive == [False]
    assert execution.fitted == 1
    for picture in pictures:
        picture.abort()


def test_fixed_forwards_are_filled_up_with_copies(doubler: Doubler, proxy: ModuleProxy) -> None:
    """Every forward has the same number of rows, whoever is there, and each call its own place among them."""
    seen: list[list[float]] = []
    doubler.fails = lambda x: seen.append(x[:, 0].tolist())
    pictures = start([lambda value=value: proxy(torch.full((1, 1), value)) for value in (1.0, 2.0, 3.0)])
    calls = [picture.call for picture in pictures if picture.call is not None]
    assert [float(row) for row in FusedCall(calls, fixed_rows=4, positions=[2, 0, 1]).run()] == [2, 4, 6]
    assert [float(row) for row in FusedCall(calls[1:2], fixed_rows=4, positions=[3]).run()] == [4]
    assert seen == [[2, 3, 1, 1], [2, 2, 2, 2]]
    for picture in pictures:
        picture.abort()


@pytest.mark.parametrize(
    ("raised", "told"),
    [(ValueError("odd"), InferenceFailed), (OutOfMemory("full"), OutOfMemory), (torch.OutOfMemoryError(), OutOfMemory)],
)
def test_an_error_in_a_pictures_own_code_becomes_its_error(raised: Exception, told: type[JobError]) -> None:
    """It is kept without the frames that raised it."""

    def body() -> None:
        raise raised

    (picture,) = start([body])
    assert picture.done
    assert type(picture.error) is told
    assert picture.error is not None
    assert picture.error.__traceback__ is None


def test_a_picture_that_is_thrown_out_unwinds_and_is_no_error(proxy: ModuleProxy) -> None:
    """Pipelines that catch every Exception do not catch this."""
    unwound = []

    def body() -> None:
        try:
            proxy(torch.ones(1, 1))
        except Exception:
            unwound.append("caught")
        finally:
            unwound.append("left")

    (picture,) = start([body])
    picture.abort()
    assert unwound == ["left"]
    assert picture.done
    assert picture.error is None


def test_a_lost_device_is_nobodys_error(proxy: ModuleProxy, doubler: Doubler) -> None:
    """It ends the hub, not a job."""

    def lose(_x: torch.Tensor) -> None:
        raise torch.AcceleratorError("injected")

    doubler.fails = lose
    (picture,) = start([lambda: proxy(torch.ones(1, 1))])
    assert picture.call is not None
    with pytest.raises(torch.AcceleratorError):
        FusedCall([picture.call]).run()
    picture.abort()


class Decoder(torch.nn.Module):
    """A decoder that notes whether it ran in inference mode."""

    lean = False

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        self.lean = torch.is_inference_mode_enabled()
        return 2 * z


@pytest.mark.parametrize(("shape", "lean"), [((1, 4, 2, 2), True), ((1, 4, 3, 2, 2), False)])
def test_pictures_are_decoded_in_inference_mode_and_videos_not(shape: tuple[int, ...], lean: bool) -> None:
    """What comes out may be changed in place, for which it is copied; a video's frames are not held twice."""
    decoder = Decoder()
    points = shared_methods_of("vae", decoder, lean=True)
    for decoded in (points["decode"].run(torch.ones(shape)), points["decode"].run(z=torch.ones(shape))):
        assert decoder.lean is lean
        decoded += 1
        assert torch.equal(decoded, torch.full(shape, 3.0))
