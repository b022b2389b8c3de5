"""Forms of outputs, and attributes of noise schedulers, as JSON and tensors."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

from worker.engine.checkpoints.trees import NotStorable, WrongTree, form_of, pack, unpack, zeros_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(2, 3, dtype=torch.bfloat16),
        (torch.ones(1), None),
        [torch.ones(2, 2), [torch.ones(1, dtype=torch.int64)]],
        {"sample": torch.ones(3), "scale": 2.5},
        UNet2DConditionOutput(sample=torch.ones(1, 4)),
    ],
)
def test_zeros_have_the_form_of_the_output(output: Any) -> None:
    form = json.loads(json.dumps(form_of(output)))
    zeros = zeros_of(form, CPU)
    assert type(zeros) is type(output)
    assert form_of(zeros) == form_of(output)
    assert not any(map(torch.any, (one for one in _tensors(zeros))))


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [tensor for item in tree for tensor in _tensors(item)] if isinstance(tree, list | tuple) else []


@pytest.mark.parametrize(
    "output", [SimpleNamespace(sample=torch.ones(1)), {1, 2}, torch.ones(1, dtype=torch.complex64)]
)
def test_outputs_of_other_kinds_are_not_storable(output: Any) -> None:
    with pytest.raises(NotStorable):
        form_of(output)


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:dict",
        "diffusers.utils.outputs:BaseOutput",
        "diffusers.nowhere:Output",
        "torch:Tensor",
        "",
    ],
)
def test_only_classes_of_outputs_are_made(name: str) -> None:
    with pytest.raises(WrongTree):
        zeros_of({"items": {}, "class": name}, CPU)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 0.1 + 0.2, float("inf"), "trailing"),
        [None, torch.tensor([1.5, 2.5])],
        (torch.tensor(7), [1, "a"]),
        {"sigma": torch.tensor([1], dtype=torch.int32), "all": [1.0]},
        {0: 1.5, 1: [None]},
        torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
        np.array([1.0, 2.0]),
        np.float32(0.1),
        np.int64(4),
        torch.Size([1, 4]),
    ],
)
def test_values_come_back_as_they_were(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack(value, "name", tensors)))
    _assert_same(unpack(packed, tensors, CPU), value)


def _assert_same(found: Any, value: Any) -> None:
    assert type(found) is type(value)
    if isinstance(value, torch.Tensor):
        assert (found.dtype, found.stride()) == (value.dtype, value.stride())
        assert torch.equal(found, value)
        assert found is not value
    elif isinstance(value, np.ndarray | np.generic):
        assert found.dtype == value.dtype
        assert np.array_equal(found, value)
    elif isinstance(value, list | tuple):
        assert len(found) == len(value)
        for one, other in zip(found, value, strict=True):
            _assert_same(one, other)
    elif isinstance(value, dict):
        assert list(found) == list(value)
        for name in value:
            _assert_same(found[name], value[name])
    else:
        assert found == value


@pytest.mark.parametrize("value", [object(), {(1,): 2}, [lambda: None], np.array(["a"])])
def test_values_of_other_kinds_are_not_storable(value: Any) -> None:
    with pytest.raises(NotStorable):
        pack(value, "name", {})


@pytest.mark.parametrize("packed", [{}, {"pickle": "x"}, [1], None])
def test_json_of_other_kinds_is_refused(packed: Any) -> None:
    with pytest.raises(WrongTree):
        unpack(packed, {}, CPU)
    with pytest.raises(WrongTree):
        zeros_of(packed, CPU)
