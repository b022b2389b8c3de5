"""Files of LoHa, LoKr and DoRA that diffusers or PEFT read give rows the same outputs as theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from harness.adapters import changes_of, file_of
from harness.lora_modules import module_output
from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from tiny import lora, lycoris

from worker.engine.lora.layer_update import Changes
from worker.engine.lora.per_row import AdapterKey, RowAdapters

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")

KEY: AdapterKey = (("file", 1.0),)


def opened(folder: Path) -> Any:
    return DiffusionPipeline.from_pretrained(folder, local_files_only=True)


@torch.no_grad()
def assert_same_row(ours: Any, changes: Changes, theirs: torch.nn.Module) -> None:
    """Check the first of two rows against the module of diffusers or PEFT, and that the second has no adapter."""
    ((component, layers),) = changes.items()
    module = getattr(ours, component)
    before = module_output(component, module)
    adapters = RowAdapters(module)
    adapters.attach(KEY, layers)
    with adapters.applied([KEY, ()], [1, 1], merge=True):
        after = module_output(component, module)
    adapters.detach(KEY)
    expected = module_output(component, theirs)
    torch.testing.assert_close(after[:1], expected[:1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after[1:], before[1:], atol=1e-6, rtol=1e-5)
    assert (expected[:1] - before[:1]).abs().max() > 1e-2


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize(
    ("model", "targets"),
    [
        ("sd", ["to_q", "to_k", "to_out.0", "conv1", "proj_in"]),
        ("sdxl", ["to_v", "conv2", "time_emb_proj"]),
        ("flux", ["to_q", "to_out.0", "net.2", "proj_out"]),
    ],
)
def test_a_dora_of_peft_has_the_norms_of_its_scale(
    model: str, targets: list[str], scale: float, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """As diffusers saves and loads it: its weights have the norms of the file at any scale."""
    theirs, ours = opened(tiny_model(model)), opened(tiny_model(model))
    component = "unet" if hasattr(theirs, "unet") else "transformer"
    config = LoraConfig(r=3, lora_alpha=5, use_dora=True, target_modules=targets, init_lora_weights=False)
    module = getattr(theirs, component)
    module.add_adapter(config, "file")
    rng = torch.Generator().manual_seed(5)
    state = {
        name: tensor * (0.5 + torch.rand(tensor.shape, generator=rng)) if "magnitude" in name else tensor
        for name, tensor in get_peft_model_state_dict(module, adapter_name="file").items()
    }
    metadata = {f"{component}_lora_adapter_metadata": config.to_dict()}
    layers = {f"{component}_lora_layers": state}
    type(theirs).save_lora_weights(tmp_path, **layers, weight_name="file.safetensors", **metadata)
    theirs = opened(tiny_model(model))
    theirs.load_lora_weights(str(tmp_path), weight_name="file.safetensors", adapter_name="file")
    theirs.set_adapters(["file"], [scale])
    changes = changes_of(ours, tmp_path / "file.safetensors", scale)
    assert all(update.gain is not None for update in changes[component].values())
    assert_same_row(ours, changes, getattr(theirs, component))


@pytest.mark.parametrize("config", [LoHaConfig, LoKrConfig])
@pytest.mark.parametrize(
    ("model", "targets"), [("sd", ["to_q", "to_k", "conv1", "conv_in"]), ("flux", ["to_q", "net.2", "proj_mlp"])]
)
def test_a_file_of_peft_has_the_alpha_of_its_configuration(
    model: str, targets: list[str], config: Any, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """By layers' patterns too; without the configuration the rank of each layer is used, which a warning says."""
    theirs, ours = opened(tiny_model(model)), opened(tiny_model(model))
    component = "unet" if hasattr(theirs, "unet") else "transformer"
    module = getattr(theirs, component)
    settings = config(
        r=2, alpha=3, alpha_pattern={"to_q": 5}, rank_pattern={"to_q": 3}, target_modules=targets, init_weights=False
    )
    inject_adapter_in_model(settings, module, "file")
    state = get_peft_model_state_dict(module, adapter_name="file")
    file = tmp_path / "adapter_model.safetensors"
    save_file({f"base_model.model.{name}": tensor.contiguous() for name, tensor in state.items()}, file)
    (warning,) = file_of(ours, file).warnings
    assert "alpha" in warning
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings.to_dict(), default=list))
    assert_same_row(ours, changes_of(ours, file), module)


def lokr_state(*layers: tuple[str, torch.nn.Module | tuple[int, int]]) -> lora.State:
    rng = torch.Generator().manual_seed(7)
    state: lora.State = {}
    for name, layer in layers:
        shaped = layer if isinstance(layer, torch.nn.Module) else torch.nn.Linear(layer[1], layer[0])
        parts, _ = lycoris.lokr_of_halves(shaped, rng) if name.endswith("1") else lycoris.lokr(shaped, rng)
        state |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    return state


def of_bfl(transformer: Any) -> lora.State:
    """Queries, keys and values in one matrix, whose parts do not end where those of the left matrix do."""
    block, single = transformer.transformer_blocks[0], transformer.single_transformer_blocks[0]
    width = block.attn.to_q.in_features
    return lokr_state(
        ("diffusion_model.double_blocks.0.img_attn.qkv", (3 * width, width)),
        ("diffusion_model.double_blocks.0.txt_attn.qkv", (3 * width, width)),
        ("diffusion_model.double_blocks.0.img_attn.proj", block.attn.to_out[0]),
        ("diffusion_model.double_blocks.0.txt_mlp.2", block.ff_context.linear_out),
        ("diffusion_model.single_blocks.0.linear2", single.attn.to_out),
        ("diffusion_model.final_layer.linear", transformer.proj_out),
    )


def of_lycoris(transformer: Any) -> lora.State:
    block, single = transformer.transformer_blocks[0], transformer.single_transformer_blocks[0]
    return lokr_state(
        ("lycoris_transformer_blocks_0_attn_to_q", block.attn.to_q),
        ("lycoris_transformer_blocks_0_ff_linear_in", block.ff.linear_in),
        ("lycoris_single_transformer_blocks_0_attn_to_qkv_mlp_proj", single.attn.to_qkv_mlp_proj),
    )


def of_diffusers(transformer: Any) -> lora.State:
    block = transformer.transformer_blocks[0]
    paths = {"attn.to_q": block.attn.to_q, "attn.to_out.0": block.attn.to_out[0]}
    return lokr_state(*((f"transformer.transformer_blocks.0.{path}", layer) for path, layer in paths.items()))


@pytest.mark.parametrize("write", [of_bfl, of_lycoris, of_diffusers])
def test_a_lokr_of_flux_2_is_that_of_diffusers(
    write: Callable[[Any], lora.State], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """diffusers joins the layers of queries, keys and values for a file that has them as one; here they stay."""
    theirs, ours = opened(tiny_model("flux-2-klein")), opened(tiny_model("flux-2-klein"))
    state = write(ours.transformer)
    if write is not of_diffusers:
        state |= {f"{name.rpartition('.')[0]}.alpha": torch.tensor(3.0) for name in state}
    file = tmp_path / "file.safetensors"
    save_file(state, file)
    theirs.load_lora_weights(str(tmp_path), weight_name=file.name)
    assert_same_row(ours, changes_of(ours, file), theirs.transformer)
