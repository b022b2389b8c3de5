"""Rules inferred from the arguments of calls: what each argument can be, in which order, and when none are inferred."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared.architectures.stacking_rules import Argument, Kind, StackingRules
from worker.engine.fusion.batch_key import batch_key
from worker.engine.fusion.inferred_rules import MAX_GUESSES, altered_call, guess_rules
from worker.engine.fusion.stacking import Stacker

SIZES = {"time_ids": torch.ones(2, 6), "none": None}
POSITIONS = [torch.arange(1), torch.arange(4), torch.arange(4)]


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


def first_guess(*calls: dict[str, Any]) -> StackingRules:
    return next(guess_rules(calls))


def kinds_of(name: str, *calls: dict[str, Any]) -> list[Kind]:
    """Return the kinds that the guesses give one argument, in order."""
    guesses = [rules.arguments.get(name, Argument(Kind.EQUAL)).kind for rules in guess_rules(calls)]
    return list(dict.fromkeys(guesses))


def test_the_kinds_of_arguments_are_inferred_from_their_shapes() -> None:
    """Values with one entry per row are stacked, numbers repeated, other tensors compared; the rest must be equal."""
    rules = first_guess(call(2), call(1))
    assert rules.rows == "hidden_states"
    assert {name: argument.kind for name, argument in rules.arguments.items()} == KINDS
    stacked = Stacker(rules).stack([call(2), call(1)], [2, 1])
    assert stacked["hidden_states"][:, 0, 0].tolist() == [2, 2, 1]
    assert stacked["step"].tolist() == [3, 3, 3]
    assert stacked["sizes"]["time_ids"].shape == (3, 6)


@pytest.mark.parametrize(
    ("value", "other", "kinds"),
    [
        (9, 9, [Kind.EQUAL, Kind.ROWS]),
        (9, 8, [Kind.ROWS, Kind.EQUAL]),
        (0.5, 0.5, [Kind.ROWS, Kind.EQUAL]),
        (torch.tensor(7), torch.tensor(7), [Kind.ROWS, Kind.SAME]),
        (torch.tensor(7), torch.tensor(8), [Kind.ROWS]),
        (POSITIONS, POSITIONS, [Kind.SAME]),
        ((torch.ones(16, 8), torch.ones(16, 8)), (torch.ones(16, 8), torch.ones(16, 8)), [Kind.SAME]),
        ({"positions": torch.arange(5), "scale": 2.0}, {"positions": torch.arange(5), "scale": 2.0}, [Kind.SAME]),
        (torch.ones(6, 7, 8), torch.ones(3, 7, 8), [Kind.GROUPED, Kind.SAME]),
        (torch.ones(2, 2, 7, 8), torch.ones(2, 1, 7, 8), [Kind.LAYERED, Kind.SAME]),
        (torch.ones(1), torch.ones(1), [Kind.SAME]),
        ([(1, 4, 4)] * 2, [(1, 4, 4)], [Kind.REPEATED, Kind.EQUAL]),
    ],
    ids=[
        "a height",
        "times as integers",
        "times as numbers",
        "a time of all rows",
        "other times",
        "a list of position tensors",
        "a pair of rotations",
        "a tensor beside a number",
        "frames of each row",
        "layers that are as many as rows of one call",
        "one entry for all rows",
        "a shape per row",
    ],
)
def test_an_argument_is_read_in_the_likeliest_way_first(value: Any, other: Any, kinds: list[Kind]) -> None:
    """Calls with different numbers of rows show what is no row."""
    assert kinds_of("more", call(2, more=value), call(1, more=other)) == kinds


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (torch.zeros(1, 1, 32, 32), [Kind.STACKED, Kind.SAME]),
        (torch.ones(3, 7, 8), [Kind.SAME, Kind.GROUPED]),
        (torch.ones(2, 1, 7, 8), [Kind.SAME, Kind.GROUPED, Kind.LAYERED]),
        ([4.0], [Kind.EQUAL, Kind.REPEATED]),
    ],
    ids=["a mask of one row", "three entries", "layers", "a list of one"],
)
def test_calls_with_equal_numbers_of_rows_leave_more_to_try(value: Any, kinds: list[Kind]) -> None:
    """With one row in each call, any dimension of one can be that of the rows."""
    assert kinds_of("more", call(1, more=value), call(1, more=value)) == kinds


def test_guesses_change_one_argument_before_two_and_are_bounded() -> None:
    """A fused forward is run for each."""
    unclear = {"hidden_states": torch.zeros(1, 2, 2)} | {f"mask_{at}": torch.zeros(1, 3) for at in range(4)}
    guesses = list(guess_rules([unclear] * 2))
    changed = [sum(rule.kind is Kind.SAME for rule in rules.arguments.values()) for rules in guesses]
    assert changed == [0, *[1] * 4, *[2] * 6]
    unclear |= {f"mask_{at}": torch.zeros(1, 3) for at in range(40)}
    assert len(list(guess_rules([unclear] * 2))) == MAX_GUESSES


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
    rules = first_guess(call(1), call(1, **changes))
    assert batch_key(rules, call(1)) != batch_key(rules, call(1, **changes))


def test_lists_of_equal_position_tensors_have_one_batch_key() -> None:
    """Each job's pipeline makes its own tensors."""
    calls = [call(1, rope=[torch.arange(1), torch.arange(size)]) for size in (4, 4, 5)]
    rules = first_guess(*calls)
    first, second, third = (batch_key(rules, one) for one in calls)
    assert first == second != third


def test_no_rules_are_inferred_without_a_batch_argument() -> None:
    """The rows of a list of samples, or of a call without samples, cannot be counted."""
    assert not list(guess_rules([{"x": [torch.ones(4, 1, 8)], "t": torch.ones(1)}] * 2))
    assert not list(guess_rules([call(1), {"timestep": torch.ones(1)}]))


def test_values_that_all_calls_share_are_altered_in_the_last() -> None:
    """A model that reads only the first row's positions then shows a difference."""
    positions, mask = torch.arange(12).reshape(1, 4, 3), torch.ones(1, 5, dtype=torch.bool)
    calls = [call(1, ids=positions, mask=mask, encoder_hidden_states=torch.full((1, 7, 8), at)) for at in (1.0, 2.0)]
    rules = first_guess(*calls)
    altered = altered_call(rules, calls)
    assert altered is not None
    assert sorted(altered["ids"].flatten().tolist()) == list(range(12))
    assert not torch.equal(altered["ids"], positions)
    assert altered["mask"].tolist() == [[True, True, True, True, False]]
    assert altered["timestep"].tolist() == [0.5]
    assert altered["encoder_hidden_states"] is calls[1]["encoder_hidden_states"]


def test_layers_of_rows_are_stacked_along_their_second_dimension() -> None:
    """The states of several layers of a text encoder."""
    rules = StackingRules("x", {"x": Argument(Kind.STACKED), "layers": Argument(Kind.LAYERED)})
    calls = [{"x": torch.zeros(rows, 1), "layers": torch.full((2, rows, 3), float(rows))} for rows in (2, 1)]
    assert batch_key(rules, calls[0]) == batch_key(rules, calls[1])
    assert Stacker(rules).stack(calls, [2, 1])["layers"][:, :, 0].tolist() == [[2, 2, 1], [2, 2, 1]]
