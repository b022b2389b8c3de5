"""Batch keys of calls, stacking of their arguments, and splitting of the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKLOutput
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from shared.architectures.registry import ARCHITECTURES
from shared.architectures.stacking_rules import STACKED, TIMES, Argument, Kind, StackingRules
from worker.engine.errors import StackingError
from worker.engine.fusion.batch_key import batch_key, count_rows, exact_key
from worker.engine.fusion.stacking import Stacker, split

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


SAME_KEY = {
    "other values": {"sample": torch.zeros(2, 4, 8, 8)},
    "other rows": unet_call(1),
    "tensors to add": {"mid_block_additional_residual": torch.zeros(2, 3, 4, 4)},
    "other time": {"timestep": torch.tensor(3)},
    "a time of other type": {"timestep": torch.tensor(3.0)},
    "a time that is a number": {"timestep": 3},
    "times by row": {"timestep": torch.tensor([3, 3])},
}
OTHER_KEY = {
    "other size": {"sample": torch.zeros(2, 4, 8, 16)},
    "other dtype": {"sample": torch.zeros(2, 4, 8, 8, dtype=torch.float16)},
    "a longer text": {"encoder_hidden_states": torch.ones(2, 9, 3)},
    "other flag": {"return_dict": True},
    "an additional argument": {"cross_attention_kwargs": {"scale": 0.5}},
    "a missing condition": {"added_cond_kwargs": {"text_embeds": torch.ones(2, 6)}},
    "a tensor without a rule": {"cross_attention_kwargs": torch.zeros(2, 3)},
}


@pytest.mark.parametrize("changes", SAME_KEY.values(), ids=SAME_KEY)
def test_calls_that_differ_in_rows_and_values_have_one_batch_key(changes: dict[str, Any]) -> None:
    """Other steps, doubled rows of guidance and other prompts do not change the key."""
    assert batch_key(UNET, unet_call(**changes)) == batch_key(UNET, unet_call())


@pytest.mark.parametrize("changes", OTHER_KEY.values(), ids=OTHER_KEY)
def test_calls_that_differ_in_anything_else_have_other_batch_keys(changes: dict[str, Any]) -> None:
    """Arguments without a rule must be equal, and a tensor equals only itself."""
    assert batch_key(UNET, unet_call(**changes)) != batch_key(UNET, unet_call())


def test_rows_without_tensors_to_add_get_zeros() -> None:
    """Pooled ones, with one value for all pixels, are spread."""
    given = {
        "down_block_additional_residuals": [torch.ones(2, 3, 4, 4)],
        "mid_block_additional_residual": torch.ones(2, 3, 2, 2),
    }
    pooled = {
        "down_block_additional_residuals": [torch.full((1, 3, 1, 1), 2.0)],
        "mid_block_additional_residual": torch.ones(1, 3, 1, 1),
    }
    calls = [unet_call(1), unet_call(2, **given), unet_call(1, **pooled)]
    stacked = Stacker(UNET).stack(calls, [1, 2, 1])
    (down,), mid = stacked["down_block_additional_residuals"], stacked["mid_block_additional_residual"]
    assert (down.shape, mid.shape) == ((4, 3, 4, 4), (4, 3, 2, 2))
    assert down[:, 0, 0, 0].tolist() == [0.0, 1.0, 1.0, 2.0]
    assert "mid_block_additional_residual" not in Stacker(UNET).stack([unet_call(), unet_call()], [2, 2])


def test_only_flux_calls_with_as_many_tensors_to_add_have_one_batch_key() -> None:
    def key(*samples: torch.Tensor) -> object:
        call = {"hidden_states": torch.ones(1, 4, 8)}
        return batch_key(FLUX, call | ({"controlnet_block_samples": list(samples)} if samples else {}))

    one, other = torch.ones(1, 4, 8), torch.zeros(1, 4, 8)
    assert key(one) == key(other)
    assert len({key(), key(one), key(one, other)}) == 3


def test_calls_with_equal_tensors_without_a_rule_have_other_batch_keys() -> None:
    """Comparing values would wait for the device at every step."""
    one, other = (unet_call(cross_attention_kwargs=torch.zeros(2, 3)) for _ in range(2))
    assert batch_key(UNET, one) != batch_key(UNET, other)
    assert batch_key(UNET, one) == batch_key(UNET, dict(reversed(one.items())))


def test_stacking_joins_rows_in_order_and_repeats_times() -> None:
    """Two rows and one row become three, each with the time of its call."""
    calls = [unet_call(2), unet_call(1, timestep=torch.tensor([3.0]))]
    stacked = Stacker(UNET).stack(calls, [2, 1])
    assert stacked["sample"][:, 0, 0, 0].tolist() == [2, 2, 1]
    assert stacked["timestep"].tolist() == [7.0, 7.0, 3.0]
    assert stacked["timestep"].dtype == torch.float32
    assert stacked["added_cond_kwargs"]["time_ids"].shape == (3, 6)
    assert stacked["return_dict"] is False


def test_a_shared_argument_is_that_of_the_first_call() -> None:
    """Positions are a function of the shape."""
    ids = torch.arange(6).reshape(2, 3)
    calls = [{"hidden_states": torch.zeros(1, 4, 2), "img_ids": ids, "timestep": torch.tensor([0.5])} for _ in range(2)]
    stacked = Stacker(FLUX).stack(calls, [1, 1])
    assert stacked["img_ids"] is ids


def test_lists_of_any_shapes_are_joined() -> None:
    """Architectures that take a list of samples mix sizes."""
    calls = [
        {"x": [torch.zeros(1, 2), torch.zeros(3, 2)], "t": 1.0},
        {"x": [torch.zeros(5, 2)], "t": torch.tensor(2.0)},
    ]
    assert [count_rows(LISTS, call) for call in calls] == [2, 1]
    stacked = Stacker(LISTS).stack(calls, [2, 1])
    assert [item.shape[0] for item in stacked["x"]] == [1, 3, 5]
    assert stacked["t"].tolist() == [1, 1, 2]


def test_listed_entries_can_be_lists_of_as_many_tensors() -> None:
    """Z-Image Omni: the images of each row, or a row without any."""
    one, other, two, none = ([[torch.zeros(1, size)] * count] for count, size in ((1, 2), (1, 3), (2, 2), (0, 2)))
    keys = [batch_key(LISTS, {"x": value, "t": 1.0}) for value in (one, other, two, none, [None])]
    assert keys[0] == keys[1]
    assert len({*keys}) == 4
    assert Stacker(LISTS).stack([{"x": one, "t": 1.0}, {"x": other, "t": 1.0}], [1, 1])["x"] == [one[0], other[0]]


def test_padding_is_masked_if_the_pipeline_gave_no_mask() -> None:
    """Pipelines drop a mask that is all ones; without one, attention would include the padding."""
    calls = [{"x": torch.zeros(1, 2), "text": torch.ones(1, length, 3)} for length in (2, 4)]
    assert batch_key(PADDED, calls[0]) == batch_key(PADDED, calls[1])
    stacked = Stacker(PADDED).stack(calls, [1, 1])
    assert stacked["text"].shape == (2, 4, 3)
    assert stacked["text"][0, 2:].abs().sum() == 0
    assert stacked["text_mask"].tolist() == [[True, True, False, False], [True] * 4]


def test_the_exact_key_separates_other_lengths_and_masks() -> None:
    """Padding to another length changes the order of sums, and so does a mask."""
    calls: list[dict[str, Any]] = [{"x": torch.zeros(1, 2), "text": torch.ones(1, length, 3)} for length in (2, 2, 4)]
    masked = calls[0] | {"text_mask": torch.ones(1, 2)}
    keys = [exact_key(PADDED, call) for call in (*calls, masked, dict(masked))]
    assert keys[0] == keys[1]
    assert len({keys[0], keys[2], keys[3]}) == 3
    assert keys[3] == keys[4], "a copy of the call"
    shapes = [exact_key(LISTS, {"x": [torch.zeros(size, 2)], "t": 1.0}) for size in (3, 3, 5)]
    assert shapes[0] == shapes[1] != shapes[2]


POSITIONS = StackingRules("x", {"x": Argument(Kind.STACKED), "ids": Argument(Kind.SAME)})


@pytest.mark.parametrize("ids", [torch.tensor(3).expand(1), torch.tensor([3]).expand(4, 1), torch.eye(2).T])
def test_tensors_in_any_memory_layout_are_compared_by_value(ids: torch.Tensor) -> None:
    """A time that was expanded has a stride of zero, and no bytes of its own."""
    x = torch.zeros(1, 2)
    assert batch_key(POSITIONS, {"x": x, "ids": ids}) == batch_key(POSITIONS, {"x": x, "ids": ids.clone()})
    assert batch_key(POSITIONS, {"x": x, "ids": ids}) != batch_key(POSITIONS, {"x": x, "ids": ids + 1})


def test_positions_of_equal_shape_have_one_batch_key_only_if_their_values_are_equal() -> None:
    """Images of 2x8 and 4x4 tokens have the same number of positions with other values."""
    wide, also_wide, square = torch.arange(6), torch.arange(6), torch.arange(6) % 3
    keys = [batch_key(POSITIONS, {"x": torch.zeros(1, 2), "ids": ids}) for ids in (wide, also_wide, square)]
    assert keys[0] == keys[1] != keys[2]
    square.copy_(wide)
    assert batch_key(POSITIONS, {"x": torch.zeros(1, 2), "ids": square}) == keys[0], "a change in place is read again"


def test_values_of_bfloat16_are_compared() -> None:
    """numpy has no bfloat16."""
    ids = torch.ones(2, dtype=torch.bfloat16)
    one, other = (batch_key(POSITIONS, {"x": torch.zeros(1, 2), "ids": value}) for value in (ids, ids * 2))
    assert one != other


def test_positions_without_memory_of_their_own_are_compared() -> None:
    """An expanded tensor, even of one entry, has no bytes that can be read in place."""
    calls = [{"x": torch.zeros(1, 2), "ids": torch.tensor(value).expand(1, 1)} for value in (1.0, 1.0, 2.0)]
    keys = [batch_key(POSITIONS, call) for call in calls]
    assert keys[0] == keys[1] != keys[2]


REPEATED = StackingRules("x", {"x": Argument(Kind.STACKED), "sizes": Argument(Kind.REPEATED)})


def test_repeated_lists_have_equal_entries_in_all_rows() -> None:
    """Models read the first entry; a call with different entries shares no forward."""
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


FORM = StackingRules("x", {"x": Argument(Kind.STACKED), "return_dict": Argument(Kind.FORM)})


def test_each_call_gets_its_output_in_the_requested_form() -> None:
    """Of one family, text-to-image can ask for a tuple and image-to-image for an object."""
    stacker, output = Stacker(FORM), AutoencoderKLOutput(latent_dist=torch.zeros(1))  # type: ignore[arg-type]
    as_tuple, as_object = {"x": torch.zeros(1, 2), "return_dict": False}, {"x": torch.zeros(1, 2)}
    assert batch_key(FORM, as_tuple) == batch_key(FORM, as_object)
    assert "return_dict" not in stacker.stack([as_tuple, as_object], [1, 1])
    assert isinstance(stacker.in_requested_form(as_tuple, output), tuple)
    assert stacker.in_requested_form(as_object, output) is output


def test_omitted_options_equal_an_empty_dict() -> None:
    """Pipelines of one family pass one or the other."""
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


def test_a_cache_that_is_not_in_use_is_omitted() -> None:
    """A call with a cache in use shares no forward."""
    rules = StackingRules("x", {"x": Argument(Kind.STACKED), "kv": Argument(Kind.CACHE)})
    idle, skipped, read, also_read = (
        {"x": torch.zeros(1, 2), "kv": _Cache([_Layer(mode)])} for mode in (None, "skip", "read", "read")
    )
    assert batch_key(rules, idle) == batch_key(rules, skipped)
    assert len({batch_key(rules, call) for call in (idle, read, also_read)}) == 3
    assert "kv" not in Stacker(rules).stack([idle, skipped], [1, 1])


def test_a_given_mask_keeps_its_zeros() -> None:
    """Given and created masks are joined, in the dtype of the given one."""
    calls = [
        {"x": torch.zeros(1, 2), "text": torch.ones(1, 2, 3), "text_mask": torch.tensor([[1, 0]])},
        {"x": torch.zeros(1, 2), "text": torch.ones(1, 3, 3)},
    ]
    assert batch_key(PADDED, calls[0]) == batch_key(PADDED, calls[1])
    stacked = Stacker(PADDED).stack(calls, [1, 1])
    assert stacked["text_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]


def test_without_padding_no_mask_is_created() -> None:
    """With equal lengths and no masks, the forward gets the pipeline's arguments."""
    calls = [{"x": torch.zeros(1, 2), "text": torch.ones(1, 2, 3)} for _ in range(2)]
    assert "text_mask" not in Stacker(PADDED).stack(calls, [1, 1])


def test_unchanged_tensors_are_joined_once() -> None:
    """A change in place joins them again."""
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
    ids=["other tensor", "times"],
)
def test_a_call_with_inconsistent_rows_is_refused(changes: dict[str, Any]) -> None:
    """Joined, it would shift the rows of the other calls."""
    with pytest.raises(StackingError):
        Stacker(UNET).stack([unet_call(**changes), unet_call()], [2, 2])


@dataclass
class _Output(Mapping[str, Any]):
    """A dataclass that is a mapping too, like the outputs of transformers."""

    state: Any
    layers: Any = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __iter__(self) -> Any:
        return iter(["state", "layers"])

    def __len__(self) -> int:
        return 2


def test_outputs_are_split_in_their_types() -> None:
    """Each call gets tensors, tuples, output classes and distributions as if it ran by itself."""
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


def test_listed_outputs_are_split_by_entry() -> None:
    """One entry per row, of any shape."""
    assert [len(part) for part in split([torch.zeros(1), torch.zeros(2), torch.zeros(3)], [1, 2], listed=True)] == [
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("output", "listed"),
    [(torch.zeros(2, 1), False), (torch.tensor(1.0), False), ([torch.zeros(1)], True)],
    ids=["too few rows", "no rows", "too few entries"],
)
def test_an_output_with_too_few_rows_is_refused(output: Any, listed: bool) -> None:
    """A job would get the image of another."""
    with pytest.raises(StackingError):
        split(output, [2, 1], listed)


def test_a_call_without_its_row_argument_is_refused() -> None:
    """A rule that does not match the forward is an error."""
    with pytest.raises(StackingError):
        count_rows(UNET, {"timestep": torch.tensor(1)})


def test_times_of_tokens_join_those_of_rows() -> None:
    """Of videos of text and from an image: some pipelines give one time per row as a column."""
    stacker = Stacker(StackingRules("x", {"x": STACKED, "t": TIMES}))
    calls = [
        {"x": torch.zeros(2, 4), "t": torch.full((2, 1), 3.0)},
        {"x": torch.zeros(1, 4), "t": torch.tensor([[0.0, 5.0, 5.0]])},
        {"x": torch.zeros(1, 4), "t": 7},
    ]
    times = stacker.stack(calls, [2, 1, 1])["t"]
    assert times.tolist() == [[3, 3, 3], [3, 3, 3], [0, 5, 5], [7, 7, 7]]


def test_every_rule_names_its_row_argument_and_masks() -> None:
    """The row argument is stacked or listed, and masks have rules."""
    for methods in ARCHITECTURES.values():
        for rules in methods.values():
            assert rules.arguments[rules.rows].kind in (Kind.STACKED, Kind.LISTED)
            for argument in rules.arguments.values():
                if argument.mask is not None:
                    assert rules.arguments[argument.mask].kind in (Kind.MASK, Kind.JOINT_MASK)


JOINT = StackingRules(
    "x",
    {
        "x": Argument(Kind.STACKED),
        "text": Argument(Kind.PADDED, mask="options"),
        "layers": Argument(Kind.PADDED),
        "ids": Argument(Kind.LONGEST),
        "options": Argument(Kind.JOINT_MASK),
    },
)


def joint_call(rows: int, length: int, mask: torch.Tensor | None = None) -> dict[str, Any]:
    text = torch.full((rows, length, 2), float(length))
    options = {} if mask is None else {"attention_mask": mask[:, None, None]}
    more = {"layers": [text, text * 2], "ids": torch.zeros(length, 3), "options": options}
    return {"x": torch.zeros(rows, 2, 4), "text": text, **more}


def test_padding_is_inserted_into_a_mask_of_text_and_samples() -> None:
    """Where a pipeline gave no mask, all its keys count; samples follow the padded text."""
    given = torch.tensor([[True, False, True, True, True], [True] * 5])
    calls = [joint_call(2, 3, given), joint_call(1, 1)]
    assert batch_key(JOINT, calls[0]) == batch_key(JOINT, calls[1])
    stacked = Stacker(JOINT).stack(calls, [2, 1])
    mask = stacked["options"]["attention_mask"]
    assert mask.shape == (3, 1, 1, 5)
    assert mask[:, 0, 0].int().tolist() == [[1, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 1, 1]]
    assert [layer[:, :, 0].tolist() for layer in stacked["layers"]] == [
        [[3, 3, 3], [3, 3, 3], [1, 0, 0]],
        [[6, 6, 6], [6, 6, 6], [2, 0, 0]],
    ]
    assert stacked["ids"].shape == (3, 3)


def test_without_padding_no_mask_of_text_and_samples_is_made() -> None:
    """A mask that hides nothing can need a slower kernel."""
    assert not Stacker(JOINT).stack([joint_call(1, 3), joint_call(1, 3)], [1, 1]).get("options")


def test_reproducible_rows_share_a_mask_only_where_each_has_one() -> None:
    """With and without one, kernels sum in another order."""
    masked = joint_call(1, 3, torch.ones(1, 5, dtype=torch.bool))
    keys = [exact_key(JOINT, call) for call in (joint_call(1, 3), joint_call(2, 3), joint_call(1, 2), masked)]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


def test_a_mask_beside_other_options_is_refused() -> None:
    """They could differ by call."""
    masked = joint_call(1, 3, torch.ones(1, 5, dtype=torch.bool))
    with pytest.raises(StackingError):
        Stacker(JOINT).stack([masked, {**masked, "options": {**masked["options"], "scale": 2.0}}], [1, 1])
