"""Texts encoded once: which calls are equal, what is kept, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling

from shared.errors import InferenceFailed
from worker.engine.fusion.module_proxy import ParkedCall, SharedMethod
from worker.engine.pipelines.text_cache import TextCache, copy_output, tokens_key


class Encoder(torch.nn.Module):
    """Tokens to one number each."""

    def forward(self, input_ids: Any, attention_mask: Any = None, pixels: Any = None, deep: bool = False) -> Any:
        raise NotImplementedError


TEXT = SharedMethod("text_encoder", "forward", Encoder())
OTHER = SharedMethod("text_encoder_2", "forward", Encoder())
UNET = SharedMethod("unet", "forward", Encoder())


def tokens(*numbers: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([numbers], dtype=dtype)


def call(*numbers: int, point: SharedMethod = TEXT, **more: Any) -> ParkedCall:
    return ParkedCall(point, (tokens(*numbers),), more)


class Run:
    """Runs calls by telling their tokens as floats, and counts them."""

    def __init__(self, calls: Sequence[ParkedCall]) -> None:
        self.calls = calls
        self.ran: list[int] = []

    def __call__(self, which: Sequence[int]) -> list[Any]:
        self.ran += which
        return [BaseModelOutputWithPooling(last_hidden_state=self.calls[at].args[0].float()) for at in which]


def told(encodings: TextCache, *calls: ParkedCall) -> tuple[list[list[float]], list[int]]:
    run = Run(calls)
    outcomes = encodings.get_or_run(calls, run)
    return [outcome.last_hidden_state[0].tolist() for outcome in outcomes], run.ran


def test_what_is_known_is_told_without_a_run() -> None:
    """In memory of its own, and only for tokens that were seen."""
    encodings = TextCache()
    assert encodings.get(call(1)) is None
    told(encodings, call(1))
    one, other = encodings.get(call(1)), encodings.get(call(1))
    assert one is not None
    one.last_hidden_state.zero_()
    assert other is not None
    assert other.last_hidden_state.tolist() == [[1]]
    assert encodings.get(call(2)) is None
    assert encodings.get(ParkedCall(UNET, (tokens(1),), {})) is None


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (call(1, 2), True),
        (call(1, 3), False),
        (call(1, 2, 0), False),
        (call(1, 2, deep=True), False),
        (call(1, 2, attention_mask=tokens(1, 0)), False),
        (call(1, 2, point=OTHER), False),
        (ParkedCall(TEXT, (tokens(1, 2, dtype=torch.int32),), {}), False),
    ],
)
def test_calls_of_the_same_tokens_are_equal(other: ParkedCall, equal: bool) -> None:
    """By value, with all that goes with them."""
    assert (tokens_key(call(1, 2)) == tokens_key(other)) is equal


def test_adapters_and_autocast_keep_calls_apart() -> None:
    """They change what the same encoder makes of the same tokens."""
    worn, cast = call(1, 2), call(1, 2)
    worn.adapter = (("ink", 1.0),)
    cast.autocast = ("cpu", torch.bfloat16)
    assert len({tokens_key(one) for one in (call(1, 2), worn, cast)}) == 3


@pytest.mark.parametrize(
    "one",
    [
        call(1, pixels=torch.zeros(1, 3, 4, 4)),
        call(1, point=UNET),
        call(1, pixels=object()),
        call(*[1] * 5000),
        ParkedCall(TEXT, (), {"deep": True}),
    ],
)
def test_other_calls_are_equal_to_none(one: ParkedCall) -> None:
    """Pictures in, too much to compare, another stage: these are run each time."""
    assert tokens_key(one) is None
    encodings = TextCache()
    for _ in range(2):
        assert Run([one, one]).ran == []
        run = Run([one, one])
        encodings.get_or_run([one, one], lambda which, run=run: run.ran.extend(which) or ["made"] * len(which))  # type: ignore[misc]
        assert run.ran == [0, 1]


def test_equal_ones_run_once_and_are_remembered() -> None:
    """Within one forward, and from forward to forward; each gets memory of its own."""
    encodings = TextCache()
    assert told(encodings, call(1), call(2), call(1)) == ([[1], [2], [1]], [0, 1])
    run = Run([call(2), call(3)])
    first, second = encodings.get_or_run(run.calls, run)
    assert run.ran == [1]
    first.last_hidden_state.zero_()
    second.last_hidden_state.zero_()
    assert told(encodings, call(2), call(3)) == ([[2], [3]], [])
    assert isinstance(first, BaseModelOutputWithPooling)


def test_the_least_recently_used_goes_first() -> None:
    """Sixteen bytes of room are four numbers; what takes more than a quarter of the room is not kept."""
    encodings = TextCache(max_bytes=16)
    for number in (1, 2, 3, 4):
        told(encodings, call(number))
    assert encodings.nbytes == 16
    assert told(encodings, call(1)) == ([[1]], [])
    assert told(encodings, call(5)) == ([[5]], [0])
    assert told(encodings, call(1), call(2)) == ([[1], [2]], [1])
    assert told(encodings, call(6, 7)) == ([[6, 7]], [0])
    assert told(encodings, call(6, 7)) == ([[6, 7]], [0])
    encodings.clear()
    assert encodings.nbytes == 0
    assert told(encodings, call(1)) == ([[1]], [0])


def test_what_cannot_be_counted_is_not_kept() -> None:
    """A language model's cache of keys and values, which comes with its states, can be larger than they are."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 64), 0)
    encodings = TextCache()
    states = torch.ones(1, 1)
    found = encodings.get_or_run([call(1)], lambda _which: [BaseModelOutputWithPast(states, past_key_values=cache)])
    assert found[0].past_key_values is cache
    assert encodings.nbytes == 0
    assert told(encodings, call(1)) == ([[1]], [0])


class Pair(NamedTuple):
    """An output that is not made of a list of its parts."""

    states: torch.Tensor
    pooled: torch.Tensor


def test_what_cannot_be_copied_is_run_for_each() -> None:
    """It is no reason for the engine to end."""
    encodings, ran = TextCache(), []

    def run(which: Sequence[int]) -> list[Pair]:
        ran.append(list(which))
        return [Pair(torch.ones(1), torch.zeros(1)) for _ in which]

    first, second = encodings.get_or_run([call(1), call(1)], run)
    assert ran == [[0], [1]]
    assert first.states is not second.states
    assert encodings.nbytes == 0


def test_memory_that_lacks_for_a_copy_is_no_end() -> None:
    """A remembered one is run again where there is no room to copy it."""

    class Full(torch.Tensor):
        full = False

        def clone(self, *args: Any, **more: Any) -> Any:
            if Full.full:
                raise torch.OutOfMemoryError("no memory")
            return torch.ones(1).as_subclass(Full)

    encodings, ran = TextCache(), []

    def run(which: Sequence[int]) -> list[torch.Tensor]:
        ran.append(list(which))
        return [torch.ones(1).as_subclass(Full) for _ in which]

    encodings.get_or_run([call(1)], run)
    encodings.get_or_run([call(1)], run)
    assert ran == [[0]]
    Full.full = True
    assert [found.tolist() for found in encodings.get_or_run([call(1)], run)] == [[1.0]]
    assert ran == [[0], [0]]


def test_an_error_is_not_remembered() -> None:
    """All who asked for the same hear of it, and the next one tries again."""
    encodings = TextCache()
    error = InferenceFailed("no")
    assert encodings.get_or_run([call(1), call(1)], lambda _which: [error]) == [error, error]
    assert told(encodings, call(1)) == ([[1]], [0])


def test_a_copy_has_the_shape_of_what_it_copies() -> None:
    """Tuples, lists, mappings and outputs, their tensors their own."""
    tree = {"a": (torch.ones(2), [torch.zeros(1), None]), "b": BaseModelOutputWithPooling(pooler_output=torch.ones(1))}
    other = copy_output(tree)
    assert isinstance(other["a"], tuple)
    assert isinstance(other["b"], BaseModelOutputWithPooling)
    assert other["a"][1][1] is None
    other["a"][0].zero_()
    assert tree["a"][0].tolist() == [1, 1]  # type: ignore[index]
