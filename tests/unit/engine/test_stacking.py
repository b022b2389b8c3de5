"""Which calls fit together, what becomes of their arguments, and how the output comes apart again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKLOutput
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from shared.signature import LIST_DENOISERS
from worker.engine.fusion.architectures import ARCHITECTURES
from worker.engine.fusion.batch_key import StackingError, batch_key, count_rows, exact_key
from worker.engine.fusion.stacking import Stacker, split
from worker.engine.fusion.stacking_rules import Argument, Kind, StackingRules

UNET = ARCHITECTURES["UNet2DConditionModel"]["forward"]
FLUX = ARCHITECTURES["FluxTransformer2DModel"]["forward"]
LISTS = StackingRules("x", {"x": Argument(Kind.LISTED), "t": Argument(Kind.ROWS)}, listed_output=True)
PADDED = StackingRules(
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
    assert batch_key(UNET, unet_call(**changes)) == batch_key(UNET, unet_call())


@pytest.mark.parametrize("changes", NOT_FITTING.values(), ids=NOT_FITTING)
def test_calls_do_not_fit_when_anything_else_differs(changes: dict[str, Any]) -> None:
    """What no rule names must be equal, and a tensor is surely equal only to itself."""
    assert batch_key(UNET, unet_call(**changes)) != batch_key(UNET, unet_call())


def test_two_calls_with_unruled_tensors_of_equal_value_do_not_fit() -> None:
    """Comparing values would wait for the device at every step."""
    one, other = (unet_call(mid_block_additional_residual=torch.zeros(2, 3)) for _ in range(2))
    assert batch_key(UNET, one) != batch_key(UNET, other)
    assert batch_key(UNET, one) == batch_key(UNET, dict(reversed(one.items())))


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
    assert batch_key(PADDED, calls[0]) == batch_key(PADDED, calls[1])
    stacked = Stacker(PADDED).stack(calls, [1, 1])
    assert stacked["text"].shape == (2, 4, 3)
    assert stacked["text"][0, 2:].abs().sum() == 0
    assert stacked["text_mask"].tolist() == [[True, True, False, False], [True] * 4]


def test_a_reproducible_row_is_not_padded_by_its_company() -> None:
    """Another length of padding sums in another order; so does a mask where there could be none."""
    calls: list[dict[str, Any]] = [{"x": torch.zeros(1, 2), "text": torch.ones(1, length, 3)} for length in (2, 2, 4)]
    masked = calls[0] | {"text_mask": torch.ones(1, 2)}
    keys = [exact_key(PADDED, call) for call in (*calls, masked, dict(masked))]
    assert keys[0] == keys[1]
    assert len({keys[0], keys[2], keys[3]}) == 3
    assert keys[3] == keys[4], "a copy of the call itself"
    shapes = [exact_key(LISTS, {"x": [torch.zeros(size, 2)], "t": 1.0}) for size in (3, 3, 5)]
    assert shapes[0] == shapes[1] != shapes[2]


POSITIONS = StackingRules("x", {"x": Argument(Kind.STACKED), "ids": Argument(Kind.SAME)})


def test_positions_of_equal_shape_fit_only_if_their_values_are_equal() -> None:
    """Pictures of 2x8 and of 4x4 tokens have as many positions, and not the same ones."""
    wide, also_wide, square = torch.arange(6), torch.arange(6), torch.arange(6) % 3
    keys = [batch_key(POSITIONS, {"x": torch.zeros(1, 2), "ids": ids}) for ids in (wide, also_wide, square)]
    assert keys[0] == keys[1] != keys[2]
    square.copy_(wide)
    assert batch_key(POSITIONS, {"x": torch.zeros(1, 2), "ids": square}) == keys[0], "a change in place is read anew"


def test_halves_have_values_too() -> None:
    """bfloat16 has no counterpart in numpy."""
    ids = torch.ones(2, dtype=torch.bfloat16)
    one, other = (batch_key(POSITIONS, {"x": torch.zeros(1, 2), "ids": value}) for value in (ids, ids * 2))
    assert one != other


REPEATED = StackingRules("x", {"x": Argument(Kind.STACKED), "sizes": Argument(Kind.REPEATED)})


def test_a_list_of_sizes_has_an_entry_a_row_and_all_are_equal() -> None:
    """The code reads the first row's; a call whose own rows differ fits with none."""
    calls: list[dict[str, Any]] = [
        {"x": torch.zeros(2, 2), "sizes": [[(1, 4, 4)]] * 2},
        {"x": torch.zeros(1, 2), "sizes": [[(1, 4, 4)]]},
        {"x": torch.zeros(1, 2), "sizes": [[(1, 2, 8)]]},
        {"x": torch.zeros(2, 2), "sizes": [[(1, 4, 4)], [(1, 2, 8)]]},
    ]
    keys = [batch_key(REPEATED, call) for call in calls]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert Stacker(REPEATED).stack(calls[:2], [2, 1])["sizes"] == [[(1, 4, 4)]] * 3


FORMED = StackingRules("x", {"x": Argument(Kind.STACKED), "return_dict": Argument(Kind.FORM)})


def test_each_call_gets_its_output_in_the_form_it_asked_for() -> None:
    """The text-to-image pipeline of a family may ask for a tuple where its image-to-image asks for an object."""
    stacker, output = Stacker(FORMED), AutoencoderKLOutput(latent_dist=torch.zeros(1))  # type: ignore[arg-type]
    as_tuple, as_object = {"x": torch.zeros(1, 2), "return_dict": False}, {"x": torch.zeros(1, 2)}
    assert batch_key(FORMED, as_tuple) == batch_key(FORMED, as_object)
    assert "return_dict" not in stacker.stack([as_tuple, as_object], [1, 1])
    assert isinstance(stacker.in_requested_form(as_tuple, output), tuple)
    assert stacker.in_requested_form(as_object, output) is output


def test_no_options_and_an_empty_dict_of_them_are_the_same() -> None:
    """Pipelines of one family differ in which they give."""
    none, empty, some = (
        unet_call(),
        unet_call(cross_attention_kwargs={}),
        unet_call(cross_attention_kwargs={"scale": 1}),
    )
    assert batch_key(UNET, none) == batch_key(UNET, empty) != batch_key(UNET, some)
    assert "cross_attention_kwargs" not in Stacker(UNET).stack([empty, none], [2, 2])


@dataclass
class _Layer:
    mode: str | None = None


@dataclass
class _Cache:
    caches: list[_Layer]


def test_a_cache_that_is_not_in_use_is_left_out() -> None:
    """One in use belongs to its call alone."""
    rules = StackingRules("x", {"x": Argument(Kind.STACKED), "kv": Argument(Kind.CACHE)})
    idle, skipped, read, also_read = (
        {"x": torch.zeros(1, 2), "kv": _Cache([_Layer(mode)])} for mode in (None, "skip", "read", "read")
    )
    assert batch_key(rules, idle) == batch_key(rules, skipped)
    assert len({batch_key(rules, call) for call in (idle, read, also_read)}) == 3
    assert "kv" not in Stacker(rules).stack([idle, skipped], [1, 1])


def test_a_mask_that_was_given_keeps_its_holes() -> None:
    """Given and made masks join, in the dtype of those given."""
    calls = [
        {"x": torch.zeros(1, 2), "text": torch.ones(1, 2, 3), "text_mask": torch.tensor([[1, 0]])},
        {"x": torch.zeros(1, 2), "text": torch.ones(1, 3, 3)},
    ]
    assert batch_key(PADDED, calls[0]) == batch_key(PADDED, calls[1])
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
    stacker.release_tensors()
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


def test_sizes_mix_exactly_where_samples_are_listed() -> None:
    """What the signature leaves out must be what the stacking rules can put together."""
    listed = {
        name
        for name, methods in ARCHITECTURES.items()
        if "forward" in methods and methods["forward"].arguments[methods["forward"].rows].kind is Kind.LISTED
    }
    assert listed == LIST_DENOISERS
