"""Which calls fit together, what becomes of their arguments, and how the output comes apart again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKLOutput
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from worker.engine.architectures import ARCHITECTURES, Argument, Kind, Rules
from worker.engine.stacking import Stacker, StackingError, count_rows, fit_key, split

UNET = ARCHITECTURES["UNet2DConditionModel"]["forward"]
FLUX = ARCHITECTURES["FluxTransformer2DModel"]["forward"]
LISTS = Rules("x", {"x": Argument(Kind.LISTED), "t": Argument(Kind.ROWS)}, listed_output=True)
PADDED = Rules(
    "x",
    {
        "x": Argument(Kind.STACKED),
        "text": Argument(Kind.PADDED, mask="text_mask"),
        "text_mask": Argument(Kind.MASK, dtype="bool"),
    },
)


def unet_call(rows: int = 2, **changes: Any) -> dict[str, Any]:
    call: dict[str, Any] = {
        "sample": torch.full((rows, 4, 8, 8), float(rows)),
        "timestep": torch.tensor(7),
        "encoder_hidden_states": torch.ones(rows, 5, 3),
        "added_cond_kwargs": {"text_embeds": torch.ones(rows, 6), "time_ids": torch.ones(rows, 6)},
        "return_dict": False,
    }
    return call | changes


FITTING = {
    "other values": {"sample": torch.zeros(2, 4, 8, 8)},
    "other rows": unet_call(1),
    "another time": {"timestep": torch.tensor(3)},
    "a time of another type": {"timestep": torch.tensor(3.0)},
    "a time that is a number": {"timestep": 3},
    "times by row": {"timestep": torch.tensor([3, 3])},
}
NOT_FITTING = {
    "another size": {"sample": torch.zeros(2, 4, 8, 16)},
    "another dtype": {"sample": torch.zeros(2, 4, 8, 8, dtype=torch.float16)},
    "a longer text": {"encoder_hidden_states": torch.ones(2, 9, 3)},
    "another flag": {"return_dict": True},
    "an argument more": {"cross_attention_kwargs": {"scale": 0.5}},
    "a condition less": {"added_cond_kwargs": {"text_embeds": torch.ones(2, 6)}},
    "a tensor that has no rule": {"mid_block_additional_residual": torch.zeros(2, 3)},
}


@pytest.mark.parametrize("changes", FITTING.values(), ids=FITTING)
def test_calls_fit_when_only_rows_and_values_differ(changes: dict[str, Any]) -> None:
    """Steps, guidance's doubling and prompts are no hindrance."""
    assert fit_key(UNET, unet_call(**changes)) == fit_key(UNET, unet_call())


@pytest.mark.parametrize("changes", NOT_FITTING.values(), ids=NOT_FITTING)
def test_calls_do_not_fit_when_anything_else_differs(changes: dict[str, Any]) -> None:
    """What no rule names must be equal, and a tensor is surely equal only to itself."""
    assert fit_key(UNET, unet_call(**changes)) != fit_key(UNET, unet_call())


def test_two_calls_with_unruled_tensors_of_equal_value_do_not_fit() -> None:
    """Comparing values would wait for the device at every step."""
    one, other = (unet_call(mid_block_additional_residual=torch.zeros(2, 3)) for _ in range(2))
    assert fit_key(UNET, one) != fit_key(UNET, other)
    assert fit_key(UNET, one) == fit_key(UNET, dict(reversed(one.items())))


def test_stacking_joins_rows_in_order_and_spreads_times() -> None:
    """Two rows and one row become three, each with its own call's time."""
    calls = [unet_call(2), unet_call(1, timestep=torch.tensor([3.0]))]
    stacked = Stacker(UNET).stack(calls, [2, 1])
    assert stacked["sample"][:, 0, 0, 0].tolist() == [2, 2, 1]
    assert stacked["timestep"].tolist() == [7.0, 7.0, 3.0]
    assert stacked["timestep"].dtype == torch.float32
    assert stacked["added_cond_kwargs"]["time_ids"].shape == (3, 6)
    assert stacked["return_dict"] is False


def test_shared_arguments_are_those_of_the_first_call() -> None:
    """Positions are a function of the shape."""
    ids = torch.arange(6).reshape(2, 3)
    calls = [{"hidden_states": torch.zeros(1, 4, 2), "img_ids": ids, "timestep": torch.tensor([0.5])} for _ in range(2)]
    stacked = Stacker(FLUX).stack(calls, [1, 1])
    assert stacked["img_ids"] is ids


def test_lists_are_joined_whatever_the_shapes() -> None:
    """Architectures that take a list of samples mix sizes."""
    calls = [
        {"x": [torch.zeros(1, 2), torch.zeros(3, 2)], "t": 1.0},
        {"x": [torch.zeros(5, 2)], "t": torch.tensor(2.0)},
    ]
    assert [count_rows(LISTS, call) for call in calls] == [2, 1]
    stacked = Stacker(LISTS).stack(calls, [2, 1])
    assert [item.shape[0] for item in stacked["x"]] == [1, 3, 5]
    assert stacked["t"].tolist() == [1, 1, 2]


def test_padding_is_masked_even_where_the_pipeline_gave_no_mask() -> None:
    """A mask that was all ones may have been dropped: padding without it would be attended to."""
    calls = [{"x": torch.zeros(1, 2), "text": torch.ones(1, length, 3)} for length in (2, 4)]
    assert fit_key(PADDED, calls[0]) == fit_key(PADDED, calls[1])
    stacked = Stacker(PADDED).stack(calls, [1, 1])
    assert stacked["text"].shape == (2, 4, 3)
    assert stacked["text"][0, 2:].abs().sum() == 0
    assert stacked["text_mask"].tolist() == [[True, True, False, False], [True] * 4]


def test_a_mask_that_was_given_keeps_its_holes() -> None:
    """Given and made masks join, in the dtype of those given."""
    calls = [
        {"x": torch.zeros(1, 2), "text": torch.ones(1, 2, 3), "text_mask": torch.tensor([[1, 0]])},
        {"x": torch.zeros(1, 2), "text": torch.ones(1, 3, 3)},
    ]
    assert fit_key(PADDED, calls[0]) == fit_key(PADDED, calls[1])
    stacked = Stacker(PADDED).stack(calls, [1, 1])
    assert stacked["text_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]


def test_nothing_to_hide_makes_no_mask() -> None:
    """Equal lengths and no masks: the forward is called as the pipeline would."""
    calls = [{"x": torch.zeros(1, 2), "text": torch.ones(1, 2, 3)} for _ in range(2)]
    assert "text_mask" not in Stacker(PADDED).stack(calls, [1, 1])


def test_what_stays_the_same_is_joined_once_until_it_changes() -> None:
    """Also a change in place is noticed."""
    stacker, text = Stacker(UNET), torch.ones(2, 5, 3)
    calls = [unet_call(encoder_hidden_states=text), unet_call()]
    first = stacker.stack(calls, [2, 2])["encoder_hidden_states"]
    assert stacker.stack(calls, [2, 2])["encoder_hidden_states"] is first
    text.add_(1)
    assert stacker.stack(calls, [2, 2])["encoder_hidden_states"][0, 0, 0] == 2
    stacker.forget()
    assert stacker.stack(calls, [2, 2])["encoder_hidden_states"] is not first


@pytest.mark.parametrize(
    "changes",
    [{"encoder_hidden_states": torch.ones(3, 5, 3)}, {"timestep": torch.tensor([1, 2, 3])}],
    ids=["another tensor", "times"],
)
def test_a_call_whose_rows_disagree_is_refused(changes: dict[str, Any]) -> None:
    """Joining it would give the neighbours its rows."""
    with pytest.raises(StackingError):
        Stacker(UNET).stack([unet_call(**changes), unet_call()], [2, 2])


@dataclass
class _Output(Mapping[str, Any]):
    """Like the outputs of transformers: a dataclass that is a mapping too."""

    state: Any
    layers: Any = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __iter__(self) -> Any:
        return iter(["state", "layers"])

    def __len__(self) -> int:
        return 2


def test_outputs_come_apart_in_their_own_types() -> None:
    """Tensors, tuples, output classes and distributions: each call sees what it would have seen alone."""
    rows = torch.arange(3.0).reshape(3, 1)
    assert [part.flatten().tolist() for part in split(rows, [2, 1])] == [[0, 1], [2]]
    first, second = split((rows, None), [2, 1])
    assert isinstance(first, tuple)
    assert first[0].shape == (2, 1)
    assert second[1] is None
    nested = split(_Output(rows, (rows, rows)), [1, 2])
    assert isinstance(nested[1], _Output)
    assert nested[1].layers[1].flatten().tolist() == [1, 2]
    encoded = AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(torch.randn(3, 8, 2, 2)))
    parts = split(encoded, [1, 2])
    assert isinstance(parts[0], AutoencoderKLOutput)
    assert torch.equal(parts[1].latent_dist.mode(), encoded.latent_dist.mode()[1:])


def test_listed_outputs_come_apart_by_entry() -> None:
    """One entry a row, of whatever shape."""
    assert [len(part) for part in split([torch.zeros(1), torch.zeros(2), torch.zeros(3)], [1, 2], listed=True)] == [
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("output", "listed"),
    [(torch.zeros(2, 1), False), (torch.tensor(1.0), False), ([torch.zeros(1)], True)],
    ids=["too few rows", "no rows", "too few entries"],
)
def test_an_output_without_a_row_for_each_is_refused(output: Any, listed: bool) -> None:
    """Somebody would get a neighbour's picture."""
    with pytest.raises(StackingError):
        split(output, [2, 1], listed)


def test_a_call_without_its_row_argument_is_refused() -> None:
    """A rule that does not fit the forward is an error of the job's, not a guess."""
    with pytest.raises(StackingError):
        count_rows(UNET, {"timestep": torch.tensor(1)})


def test_every_rule_names_the_argument_that_counts_rows() -> None:
    """The table is consistent in itself: rows come from a stacked or listed argument, masks are declared."""
    for methods in ARCHITECTURES.values():
        for rules in methods.values():
            assert rules.arguments[rules.rows].kind in (Kind.STACKED, Kind.LISTED)
            for argument in rules.arguments.values():
                if argument.mask is not None:
                    assert rules.arguments[argument.mask].kind is Kind.MASK
