"""Rules inferred from the arguments of calls: what is stacked, what must be equal, and when none are inferred."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from worker.engine.fusion.architectures import Kind
from worker.engine.fusion.batch_key import batch_key
from worker.engine.fusion.self_check import infer_rules
from worker.engine.fusion.stacking import Stacker


def call(rows: int, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "hidden_states": torch.full((rows, 16, 4), float(rows)),
        "timestep": torch.ones(rows),
        "step": torch.tensor(3),
        "encoder_hidden_states": torch.ones(rows, 7, 8),
        "img_ids": torch.arange(48).reshape(16, 3),
        "sizes": {"time_ids": torch.ones(rows, 6), "none": None},
        "options": {},
        "return_dict": False,
    }
    return arguments | changes


KINDS = {
    "hidden_states": Kind.STACKED,
    "timestep": Kind.STACKED,
    "step": Kind.ROWS,
    "encoder_hidden_states": Kind.STACKED,
    "img_ids": Kind.SAME,
    "sizes": Kind.STACKED,
}


def test_the_kinds_of_arguments_are_inferred_from_their_shapes() -> None:
    """Values with one entry per row are stacked, numbers repeated, other tensors compared; the rest must be equal."""
    rules = infer_rules([call(2), call(1)])
    assert rules is not None
    assert rules.rows == "hidden_states"
    assert {name: argument.kind for name, argument in rules.arguments.items()} == KINDS
    stacked = Stacker(rules).stack([call(2), call(1)], [2, 1])
    assert stacked["hidden_states"][:, 0, 0].tolist() == [2, 2, 1]
    assert stacked["step"].tolist() == [3, 3, 3]
    assert stacked["sizes"]["time_ids"].shape == (3, 6)


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder_hidden_states": torch.ones(1, 9, 8)},
        {"img_ids": torch.arange(48).reshape(16, 3) * 2},
        {"return_dict": True},
        {"options": {"scale": 0.5}},
    ],
    ids=["longer text", "other positions", "other flag", "options"],
)
def test_calls_that_differ_in_anything_else_have_other_batch_keys(changes: dict[str, Any]) -> None:
    """No argument is inferred to be padded or shared."""
    rules = infer_rules([call(1), call(1, **changes)])
    assert rules is not None
    assert batch_key(rules, call(1)) != batch_key(rules, call(1, **changes))


def test_no_rules_are_inferred_without_a_batch_argument() -> None:
    """The rows of a list of samples, or of a call without samples, cannot be counted."""
    assert infer_rules([{"x": [torch.ones(4, 1, 8)], "t": torch.ones(1)}] * 2) is None
    assert infer_rules([call(1), {"timestep": torch.ones(1)}]) is None
