"""The text cache: which calls are equal, which outputs are kept, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from harness.pretended_device import DEVICE, PretendedDevice
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling

from shared.errors import InferenceFailed
from worker.engine.fusion.module_proxy import ParkedCall, SharedMethod
from worker.engine.pipelines.text_cache import TextCache, tokens_key, try_copy


class Encoder(torch.nn.Module):
    """A module with the signature of a text encoder."""

    def forward(self, input_ids: Any, attention_mask: Any = None, pixels: Any = None, deep: bool = False) -> Any:
        raise NotImplementedError


TEXT = SharedMethod("text_encoder", "forward", Encoder())
OTHER = SharedMethod("text_encoder_2", "forward", Encoder())
UNET = SharedMethod("unet", "forward", Encoder())


def tokens(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([numbers], dtype=dtype)


def call(*numbers: int, method: SharedMethod = TEXT, **more: Any) -> ParkedCall:
    return ParkedCall(method, (tokens(*numbers),), more)


class Run:
    """Returns the tokens of calls as floats, and records which calls ran."""

    def __init__(self, calls: Sequence[ParkedCall]) -> None:
        self.calls = calls
        self.ran: list[int] = []

    def __call__(self, indexes: Sequence[int]) -> list[Any]:
        self.ran += indexes
        return [BaseModelOutputWithPooling(last_hidden_state=self.calls[at].args[0].float()) for at in indexes]


def encode(cache: TextCache, *calls: ParkedCall) -> tuple[list[list[float]], list[int]]:
    run = Run(calls)
    outcomes = cache.get_or_run(calls, run)
    return [outcome.last_hidden_state[0].tolist() for outcome in outcomes], run.ran


def test_cached_outputs_are_returned_without_a_run() -> None:
    """Each is a copy, and only known tokens have one."""
    cache = TextCache()
    assert cache.get(call(1)) is None
    encode(cache, call(1))
    one, other = cache.get(call(1)), cache.get(call(1))
    assert one is not None
    one.last_hidden_state.zero_()
    assert other is not None
    assert other.last_hidden_state.tolist() == [[1]]
    assert cache.get(call(2)) is None
    assert cache.get(ParkedCall(UNET, (tokens(1),), {})) is None


def test_tokens_are_read_once() -> None:
    """Reading them waits for the device; a call is looked up when it parks, and again before it runs."""
    cache = TextCache()
    with PretendedDevice() as device:
        parked = ParkedCall(TEXT, (tokens(1, 2).to(DEVICE, non_blocking=True),), {})
        assert cache.get(parked) is None
        cache.get_or_run([parked], lambda _indexes: [torch.ones(1)])
        assert dict(device.waits) == {"copy to the host": 1}
    assert cache.get(call(1, 2)) is not None


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (call(1, 2), True),
        (call(1, 3), False),
        (call(1, 2, 0), False),
        (call(1, 2, deep=True), False),
        (call(1, 2, attention_mask=tokens(1, 0)), False),
        (call(1, 2, method=OTHER), False),
        (ParkedCall(TEXT, (tokens(1, 2, dtype=torch.int32),), {}), False),
    ],
)
def test_calls_with_the_same_tokens_have_one_key(other: ParkedCall, equal: bool) -> None:
    """Tokens and other arguments are compared by value."""
    assert (tokens_key(call(1, 2)) == tokens_key(other)) is equal


def test_adapters_and_autocast_are_part_of_the_key() -> None:
    """They change the output for the same tokens."""
    adapted, cast = call(1, 2), call(1, 2)
    adapted.adapter = (("ink", 1.0),)
    cast.autocast = ("cpu", torch.bfloat16)
    assert len({tokens_key(one) for one in (call(1, 2), adapted, cast)}) == 3


@pytest.mark.parametrize(
    "one",
    [
        call(1, pixels=torch.zeros(1, 3, 4, 4)),
        call(1, method=UNET),
        call(1, pixels=object()),
        call(*[1] * 5000),
        ParkedCall(TEXT, (), {"deep": True}),
    ],
)
def test_calls_with_other_inputs_are_not_cached(one: ParkedCall) -> None:
    """Image inputs, too many tokens and other stages run each time."""
    assert tokens_key(one) is None
    cache = TextCache()
    for _ in range(2):
        assert Run([one, one]).ran == []
        run = Run([one, one])
        cache.get_or_run([one, one], lambda indexes, run=run: run.ran.extend(indexes) or ["output"] * len(indexes))  # type: ignore[misc]
        assert run.ran == [0, 1]


def test_equal_calls_run_once_and_are_cached() -> None:
    """Within one forward and over several; no two outputs share memory."""
    cache = TextCache()
    assert encode(cache, call(1), call(2), call(1)) == ([[1], [2], [1]], [0, 1])
    run = Run([call(2), call(3)])
    first, second = cache.get_or_run(run.calls, run)
    assert run.ran == [1]
    first.last_hidden_state.zero_()
    second.last_hidden_state.zero_()
    assert encode(cache, call(2), call(3)) == ([[2], [3]], [])
    assert isinstance(first, BaseModelOutputWithPooling)


def test_the_least_recently_used_output_is_evicted_first() -> None:
    """16 bytes hold four numbers; an output above a quarter of them is not kept."""
    cache = TextCache(max_bytes=16)
    for number in (1, 2, 3, 4):
        encode(cache, call(number))
    assert cache.nbytes == 16
    assert encode(cache, call(1)) == ([[1]], [])
    assert encode(cache, call(5)) == ([[5]], [0])
    assert encode(cache, call(1), call(2)) == ([[1], [2]], [1])
    assert encode(cache, call(6, 7)) == ([[6, 7]], [0])
    assert encode(cache, call(6, 7)) == ([[6, 7]], [0])
    cache.clear()
    assert cache.nbytes == 0
    assert encode(cache, call(1)) == ([[1]], [0])


def test_outputs_of_unknown_size_are_not_kept() -> None:
    """A language model's cache of keys and values can be larger than the states."""
    key_values = DynamicCache()
    key_values.update(torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 64), 0)
    cache = TextCache()
    states = torch.ones(1, 1)
    outputs = cache.get_or_run(
        [call(1)], lambda _indexes: [BaseModelOutputWithPast(states, past_key_values=key_values)]
    )
    assert outputs[0].past_key_values is key_values
    assert cache.nbytes == 0
    assert encode(cache, call(1)) == ([[1]], [0])


class Pair(NamedTuple):
    """An output whose class takes no list of its items."""

    states: torch.Tensor
    pooled: torch.Tensor


def test_calls_whose_output_cannot_be_copied_run_one_by_one() -> None:
    """The failed copy does not end the engine's thread."""
    cache, ran = TextCache(), []

    def run(indexes: Sequence[int]) -> list[Pair]:
        ran.append(list(indexes))
        return [Pair(torch.ones(1), torch.zeros(1)) for _ in indexes]

    first, second = cache.get_or_run([call(1), call(1)], run)
    assert ran == [[0], [1]]
    assert first.states is not second.states
    assert cache.nbytes == 0


def test_a_call_runs_again_if_there_is_no_memory_for_a_copy() -> None:
    """The failed copy of a cached output does not end the engine's thread."""

    class Full(torch.Tensor):
        full = False

        def clone(self, *args: Any, **more: Any) -> Any:
            if Full.full:
                raise torch.OutOfMemoryError("no memory")
            return torch.ones(1).as_subclass(Full)

    cache, ran = TextCache(), []

    def run(indexes: Sequence[int]) -> list[torch.Tensor]:
        ran.append(list(indexes))
        return [torch.ones(1).as_subclass(Full) for _ in indexes]

    cache.get_or_run([call(1)], run)
    cache.get_or_run([call(1)], run)
    assert ran == [[0]]
    Full.full = True
    assert [output.tolist() for output in cache.get_or_run([call(1)], run)] == [[1.0]]
    assert ran == [[0], [0]]


def test_an_error_is_not_cached() -> None:
    """All equal calls get the error, and the next one runs again."""
    cache = TextCache()
    error = InferenceFailed("no")
    assert cache.get_or_run([call(1), call(1)], lambda _indexes: [error]) == [error, error]
    assert encode(cache, call(1)) == ([[1]], [0])


def test_a_copied_output_has_the_same_form() -> None:
    """Tuples, lists, mappings and output classes are kept; tensors are cloned."""
    tree = {"a": (torch.ones(2), [torch.zeros(1), None]), "b": BaseModelOutputWithPooling(pooler_output=torch.ones(1))}
    other = try_copy(tree)
    assert isinstance(other["a"], tuple)
    assert isinstance(other["b"], BaseModelOutputWithPooling)
    assert other["a"][1][1] is None
    other["a"][0].zero_()
    assert tree["a"][0].tolist() == [1, 1]  # type: ignore[index]
