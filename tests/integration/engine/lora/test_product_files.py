"""Files of LoHa, LoKr and DoRA give rows the same outputs as weights that are merged by the published formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from harness.adapters import (
    MergedReference,
    assert_all_like_solo,
    changes_of,
    eight_jobs,
    file_of,
    run_together,
    spec_with,
)
from harness.engine import DIFFUSERS_AND_NUMPY
from harness.lora_modules import module_output
from parity.running import as_floats
from safetensors.torch import save_file
from tiny import lora, lycoris

from shared.errors import AdapterUnavailable
from worker.engine.lora.layer_update import Changes
from worker.engine.lora.per_row import AdapterKey, RowAdapters

pytestmark = pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY, "ignore:Already found a `peft_config`")

KEY: AdapterKey = (("file", 1.0),)
OTHER: AdapterKey = (("other", 1.0),)
ALPHA = 3.0

Weights = dict[tuple[str, str], torch.Tensor]
"""Merged weights by component and path."""


def opened(folder: Path) -> Any:
    return DiffusionPipeline.from_pretrained(folder, local_files_only=True)


def kohya_name(component: str, path: str) -> str:
    prefix = {"unet": "lora_unet", "text_encoder": "lora_te", "transformer": "lora_unet"}[component]
    text = "text_model." if component == "text_encoder" and not path.startswith("text_model") else ""
    return f"{prefix}_{(text + path).replace('.', '_')}"


def dotted_name(component: str, path: str) -> str:
    return f"{component}.{path}"


def adaptable(module: torch.nn.Module, wanted: Callable[[str], bool]) -> dict[str, torch.nn.Module]:
    kinds = torch.nn.Linear | torch.nn.Conv2d
    return {path: one for path, one in module.named_modules() if isinstance(one, kinds) and wanted(path)}


def unet_layers(path: str) -> bool:
    """Return whether trainers change the layer `path` of a U-Net, those of LoCon and LyCORIS convolutions too."""
    return lora.attention(path) or path.endswith(("ff.net.2", "conv1", "conv2", "conv_shortcut", "proj_in"))


def write(
    pipeline: Any,
    file: Path,
    make: lycoris.Maker,
    name: Callable[[str, str], str],
    components: Mapping[str, Callable[[str], bool]],
    dora: str | None = None,
) -> Weights:
    """Write a file, and return the weights that it makes of those of the pipeline."""
    rng, state, merged = torch.Generator().manual_seed(11), {}, {}
    for component, wanted in components.items():
        for path, layer in adaptable(getattr(pipeline, component), wanted).items():
            parts, change = make(layer, rng)
            scale = 1.0 if "lokr_w1" in parts and "lokr_w2" in parts else ALPHA / lycoris.RANK
            own = name(component, path)
            state |= {f"{own}.{part}": tensor for part, tensor in parts.items()}
            state[f"{own}.alpha"] = torch.tensor(ALPHA)
            weight = layer.weight.detach() + scale * change
            if dora is not None:
                norms = lycoris.norms(layer.weight.detach(), rng, of_inputs=dora == "inputs")
                state[f"{own}.dora_scale"] = norms
                weight = lycoris.decomposed(weight, norms, of_inputs=dora == "inputs")
            merged[component, path] = weight
    save_file(state, file)
    return merged


@torch.no_grad()
def assert_row_has_weights(ours: Any, changes: Changes, merged: Weights, other: Changes | None = None) -> None:
    """Check the first of three rows against `merged`; the second has no adapter, and the third has `other`."""
    for component, layers in changes.items():
        module = getattr(ours, component)
        before = module_output(component, module, rows=3)
        adapters = RowAdapters(module)
        adapters.attach(KEY, layers)
        if other is not None:
            adapters.attach(OTHER, other[component])
        third: AdapterKey = () if other is None else OTHER
        with adapters.applied([KEY, (), third], [1, 1, 1], merge=True):
            after = module_output(component, module, rows=3)
        adapters.detach(KEY)
        with adapters.applied([third] * 3, [1, 1, 1], merge=True):
            of_third = module_output(component, module, rows=3)
        adapters.detach(third)
        originals = {path: module.get_submodule(path).weight.detach().clone() for path in layers}
        for path in layers:
            module.get_submodule(path).weight.copy_(merged[component, path])
        expected = module_output(component, module, rows=3)
        for path, weight in originals.items():
            module.get_submodule(path).weight.copy_(weight)
        torch.testing.assert_close(after[:1], expected[:1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(after[1:2], before[1:2], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(after[2:], of_third[2:], atol=1e-5, rtol=1e-5)
        assert (expected[:1] - before[:1]).abs().max() > 1e-2
    assert {(component, path) for component, layers in changes.items() for path in layers} == set(merged)


U_NET = {"unet": unet_layers}
U_NET_AND_CLIP = {**U_NET, "text_encoder": lambda path: path.endswith(("q_proj", "out_proj", "fc1"))}
FORMS: dict[str, lycoris.Maker] = {
    "loha": lycoris.loha,
    "loha-cores": lycoris.loha_with_cores,
    "lokr": lycoris.lokr,
    "lokr-halves": lycoris.lokr_of_halves,
    "lokr-core": lycoris.lokr_with_core,
    "locon-core": lycoris.low_rank_with_core,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", ["sd", "sdxl"])
def test_a_file_of_lycoris_changes_linear_layers_and_convolutions(
    model: str, form: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """By kohya's names, with an alpha for each layer, in one forward with another adapter and none."""
    ours, file = opened(tiny_model(model)), tmp_path / "file.safetensors"
    merged = write(ours, file, FORMS[form], kohya_name, U_NET_AND_CLIP if model == "sd" else U_NET)
    other = lora.save(ours, tmp_path / "other.safetensors", 1, ("unet", "text_encoder"))
    assert_row_has_weights(ours, changes_of(ours, file), merged, changes_of(ours, other))


LDM_BLOCKS = {
    "down_blocks.1.attentions.0": "input_blocks_3_1",
    "mid_block.attentions.0": "middle_block_1",
    "up_blocks.0.attentions.0": "output_blocks_0_1",
}


def ldm_name(_component: str, path: str) -> str:
    block = next(block for block in LDM_BLOCKS if path.startswith(block))
    return f"lora_unet_{path.replace(block, LDM_BLOCKS[block]).replace('.', '_')}"


def test_a_file_of_lycoris_has_the_names_that_trainers_use_for_xl(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Those of its authors' U-Net, with norms of a DoRA too."""
    ours, file = opened(tiny_model("sdxl")), tmp_path / "file.safetensors"
    wanted = {"unet": lambda path: lora.attention(path) and path.startswith(tuple(LDM_BLOCKS))}
    merged = write(ours, file, lycoris.loha, ldm_name, wanted, "outputs")
    assert_row_has_weights(ours, changes_of(ours, file), merged)


@pytest.mark.parametrize("form", ["loha", "lokr", "lokr-halves"])
def test_a_file_of_lycoris_changes_a_transformer(form: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    ours, file = opened(tiny_model("flux")), tmp_path / "file.safetensors"
    merged = write(ours, file, FORMS[form], dotted_name, {"transformer": lora.attention})
    other = lora.save(ours, tmp_path / "other.safetensors", 1)
    assert_row_has_weights(ours, changes_of(ours, file), merged, changes_of(ours, other))


@pytest.mark.parametrize("dora", ["outputs", "inputs"])
@pytest.mark.parametrize("form", ["low-rank", "loha", "lokr-halves"])
def test_weights_get_the_norms_of_a_dora(
    form: str, dora: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    ours, file = opened(tiny_model("sd")), tmp_path / "file.safetensors"
    make = {"low-rank": lycoris.low_rank, **FORMS}[form]
    merged = write(ours, file, make, kohya_name, U_NET_AND_CLIP, dora)
    assert_row_has_weights(ours, changes_of(ours, file), merged)
    plain = {key: getattr(ours, key[0]).get_submodule(key[1]).weight.detach() for key in merged}
    half = {key: plain[key] + 0.5 * (merged[key] - plain[key]) for key in merged}
    assert_row_has_weights(ours, changes_of(ours, file, 0.5), half)


FUSED = ["to_q", "to_k", "to_v"]


@pytest.mark.parametrize("dora", [None, "outputs"])
@pytest.mark.parametrize("form", ["loha", "lokr", "lokr-halves"])
def test_layers_that_a_file_has_as_one_are_divided(
    form: str, dora: str | None, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Queries, keys and values of FLUX, whose parts do not end where those of the left matrix of a LoKr do."""
    ours, file = opened(tiny_model("flux")), tmp_path / "file.safetensors"
    attention = ours.transformer.transformer_blocks[0].attn
    joined = joined_layer(attention)
    rng = torch.Generator().manual_seed(11)
    parts, change = FORMS[form](joined, rng)
    scale = 1.0 if form == "lokr" else ALPHA / lycoris.RANK
    weight = joined.weight.detach() + scale * change
    state = {**parts, "alpha": torch.tensor(ALPHA)}
    if dora is not None:
        state["dora_scale"] = lycoris.norms(joined.weight.detach(), rng)
        weight = lycoris.decomposed(weight, state["dora_scale"])
    save_file({f"lora_unet_double_blocks_0_img_attn_qkv.{part}": tensor for part, tensor in state.items()}, file)
    paths = [("transformer", f"transformer_blocks.0.attn.{name}") for name in FUSED]
    assert_row_has_weights(ours, changes_of(ours, file), dict(zip(paths, weight.chunk(3), strict=True)))


def joined_layer(attention: Any) -> torch.nn.Linear:
    weights = [getattr(attention, name).weight.detach() for name in FUSED]
    joined = torch.nn.Linear(weights[0].shape[1], sum(one.shape[0] for one in weights), bias=False)
    joined.weight = torch.nn.Parameter(torch.cat(weights))
    return joined


KERNEL = {"lora_mid.weight": (1, 1, 7, 7), "lora_down.weight": (1, 16), "lora_up.weight": (16, 1)}
CORE = {"lokr_w1": (1, 1), "lokr_w2_a": (1, 16), "lokr_w2_b": (1, 16), "lokr_t2": (1, 1, 7, 7)}
COLUMNS = {"lokr_w1": (16, 1), "lokr_w2": (1, 2_000_000)}


@pytest.mark.parametrize("shapes", [KERNEL, CORE, COLUMNS])
def test_products_larger_than_their_layer_are_refused_before_they_are_made(
    shapes: Mapping[str, tuple[int, ...]], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """By the reader already: nothing compares shapes before all of the file is read."""
    ours, file = opened(tiny_model("sd")), tmp_path / "file.safetensors"
    own = kohya_name("unet", "down_blocks.0.resnets.0.conv1")
    save_file({f"{own}.{part}": torch.ones(shape, dtype=torch.float16) for part, shape in shapes.items()}, file)
    with pytest.raises(AdapterUnavailable, match=r"unet\.down_blocks\.0\.resnets\.0\.conv1 is .*takes \[16, 144\]"):
        file_of(ours, file)


def test_norms_of_the_inputs_of_several_layers_are_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    ours, file = opened(tiny_model("flux")), tmp_path / "file.safetensors"
    joined = joined_layer(ours.transformer.transformer_blocks[0].attn)
    parts, _ = lycoris.low_rank(joined, torch.Generator())
    parts["dora_scale"] = torch.ones(1, joined.in_features)
    save_file({f"lora_unet_double_blocks_0_img_attn_qkv.{part}": tensor for part, tensor in parts.items()}, file)
    with pytest.raises(AdapterUnavailable, match=r"img_attn_qkv has norms of inputs, for several layers"):
        changes_of(ours, file)


@pytest.mark.parametrize("family", ["sd", "flux", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_jobs_with_adapters_of_any_form_and_none_share_one_forward(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """LoHa, LoKr and DoRA, alone and together: each image is that of merged weights."""
    folder = tiny_model(family)
    pipeline = opened(folder)
    unet = hasattr(pipeline, "unet")
    name = kohya_name if unet else dotted_name
    components = U_NET if unet else {"transformer": lora.attention}
    forms = {"ink": (lycoris.loha, None), "oil": (lycoris.lokr_of_halves, None), "neon": (lycoris.loha, "outputs")}
    files = {form: tmp_path / f"{form}.safetensors" for form in forms}
    merged = {form: write(pipeline, files[form], make, name, components, dora) for form, (make, dora) in forms.items()}
    jobs = eight_jobs()
    with as_floats():
        recorder = run_together(spec_with(folder, files), *jobs)
        assert_all_like_solo(recorder, MergedReference(folder, merged), jobs)
    assert recorder.rows == [8, 8, 7, 1]
