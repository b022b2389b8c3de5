"""LoRA adapters of the rows of a forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import lora, tokens
from tiny.images import qwen

from shared.config.adapters import Adapter
from worker.engine.lora.adapter_files import AdapterFile
from worker.engine.lora.layer_update import LayerUpdate
from worker.engine.lora.per_row import ModelAdapters, RowAdapters, Span, adapter_key, spans

A, B = (("a", 1.0),), (("b", 0.5),)


def test_adapter_key_ignores_order_and_zero_scales() -> None:
    ink, oil, none = Adapter(id="ink", scale=0.5), Adapter(id="oil"), Adapter(id="pastel", scale=0.0)
    assert adapter_key((ink, none, oil)) == adapter_key((oil, ink)) == (("ink", 0.5), ("oil", 1.0))
    assert adapter_key((none,)) == ()


@pytest.mark.parametrize(
    ("keys", "rows", "merge", "expected"),
    [
        ([A, (), B], [2, 2, 1], True, [Span(0, 2, A), Span(4, 5, B)]),
        ([A, A, B, A], [1, 2, 1, 1], True, [Span(0, 3, A), Span(3, 4, B), Span(4, 5, A)]),
        ([A, A, B], [2, 2, 2], False, [Span(0, 2, A), Span(2, 4, A), Span(4, 6, B)]),
        ([(), ()], [2, 2], True, []),
        ([(), ()], [2, 2], False, []),
    ],
)
def test_rows_are_grouped_into_spans(
    keys: Sequence[Any], rows: Sequence[int], merge: bool, expected: list[Span]
) -> None:
    """Equal neighbours are one span, unless results must not depend on them; rows without adapters are in none."""
    assert spans(keys, rows, merge=merge) == expected


@torch.no_grad()
def test_rows_use_their_own_adapters_and_hooks_are_removed() -> None:
    layer = torch.nn.Linear(3, 4)
    module = torch.nn.Sequential(layer)
    adapters = RowAdapters(module)
    adapters.per_row = True
    x = torch.randn(3, 3)
    plain = module(x)
    changes = {key: LayerUpdate(torch.randn(2, 3), torch.randn(4, 2)) for key in (A, B)}
    for key, change in changes.items():
        adapters.attach(key, {"0": change})
    assert not adapters.idle
    assert torch.equal(module(x), plain), "adapters apply only inside a forward with keys"
    with adapters.applied([B, (), A], [1, 1, 1], merge=True):
        mixed = module(x)
    for row, key in ((0, B), (2, A)):
        change = changes[key]
        torch.testing.assert_close(mixed[row], plain[row] + change.up @ (change.down @ x[row]))
    assert torch.equal(mixed[1], plain[1])
    adapters.detach(A)
    adapters.detach(B)
    assert adapters.idle
    assert not layer._forward_hooks


@torch.no_grad()
def test_rows_whose_timesteps_are_embedded_with_zeros_use_their_own_adapters() -> None:
    """Like Qwen-Image-Edit 2511: the embedding gets the timesteps of all rows, and then a zero for each."""
    torch.manual_seed(3)
    module = qwen.transformer(zero_cond_t=True).eval()
    adapters = RowAdapters(module)
    for seed, key in enumerate((A, B)):
        state = lora.weights(module, seed, lambda path: "img_mod" in path or "timestep_embedder" in path)
        paths = {name.partition(".lora_")[0] for name in state}
        adapters.attach(
            key, {at: LayerUpdate(state[f"{at}.lora_A.weight"], state[f"{at}.lora_B.weight"]) for at in paths}
        )
    keys: list[Any] = [A, (), B]
    hidden, text = torch.randn(3, 8, 24), torch.randn(3, 5, tokens.WIDTH)
    times = torch.tensor([0.9, 0.5, 0.2])

    def run(rows: slice) -> torch.Tensor:
        own = keys[rows]
        with adapters.applied(own, [1] * len(own), merge=True):
            output: torch.Tensor = module(
                hidden_states=hidden[rows],
                encoder_hidden_states=text[rows],
                encoder_hidden_states_mask=torch.ones(len(own), 5, dtype=torch.bool),
                timestep=times[rows],
                img_shapes=[[(1, 2, 2), (1, 2, 2)]] * len(own),
                return_dict=False,
            )[0]
        return output

    solo = torch.cat([run(slice(at, at + 1)) for at in range(3)])
    torch.testing.assert_close(run(slice(0, 3)), solo, rtol=0, atol=1e-5)


def test_least_recently_used_adapters_are_removed_first() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4))
    adapters = ModelAdapters({"unet": RowAdapters(module)})
    change = LayerUpdate(torch.zeros(1, 3), torch.zeros(4, 1))
    keys = [((name, 1.0),) for name in "abcd"]
    for key in keys:
        adapters.attach(key, AdapterFile({"unet": {"0": change}}))
    assert adapters.nbytes == 4 * change.nbytes
    assert adapters.use(keys[0])
    assert adapters.use(())
    assert not adapters.use((("e", 1.0),))
    adapters.trim(2 * change.nbytes, {keys[1]})
    assert adapters.attached == (keys[1], keys[0])
    adapters.trim(0, {keys[1]})
    assert adapters.attached == (keys[1],)
    adapters.trim(0, set())
    assert adapters.attached == ()
    assert not module[0]._forward_hooks


@pytest.mark.parametrize(
    ("layer", "shape"), [(torch.nn.Linear(3, 5), (2, 7, 3)), (torch.nn.Conv2d(3, 5, 3), (2, 3, 4, 4))]
)
@torch.no_grad()
def test_a_change_of_the_bias_alone_is_added_to_the_outputs_of_its_rows(
    layer: torch.nn.Module, shape: tuple[int, ...]
) -> None:
    module, inputs, bias = torch.nn.Sequential(layer), torch.randn(shape), torch.arange(5.0)
    plain = module(inputs)
    adapters = RowAdapters(module)
    key = (("one", 1.0),)
    adapters.attach(key, {"0": LayerUpdate(None, None, bias)})
    with adapters.applied([(), key], [1, 1], merge=True):
        changed = module(inputs)
    across = bias.reshape(5, 1, 1) if isinstance(layer, torch.nn.Conv2d) else bias
    torch.testing.assert_close(changed, torch.stack([plain[0], plain[1] + across]))
