"""LoRA files of all formats give rows the same changes as diffusers and PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from harness.adapters import changes_of, file_of
from harness.engine import EngineHarness, a_job, a_spec
from harness.lora_modules import module_output
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tiny import lora

from shared.config.adapters import Adapter, AdapterSpec
from shared.errors import AdapterUnavailable
from worker.engine.fusion.module_proxy import shared_methods_of
from worker.engine.lora.fitting import check_rank, combine
from worker.engine.lora.per_row import AdapterKey, RowAdapters

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")

KEY: AdapterKey = (("file", 1.0),)
Write = Callable[[Any, Path], None]


def opened(folder: Path) -> Any:
    return DiffusionPipeline.from_pretrained(folder, local_files_only=True)


def old_names(pipeline: Any, file: Path) -> None:
    """The format of diffusers before PEFT, with convolutions and a text encoder."""
    state = {f"unet.{name}": tensor for name, tensor in lora.weights(pipeline.unet, 1).items()}
    state = {name.replace("lora_A", "lora.down").replace("lora_B", "lora.up"): tensor for name, tensor in state.items()}
    text = convert_state_dict_to_diffusers(lora.weights(pipeline.text_encoder, 2))
    save_file(state | {f"text_encoder.{name}": tensor for name, tensor in text.items()}, file)


def with_configuration(pipeline: Any, file: Path) -> None:
    """The present format of diffusers: ranks, alphas and the kind of scaling are in the file's metadata."""
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        rank_pattern={"attn1.to_q": 2},
        alpha_pattern={"attn1.to_q": 5},
        target_modules=["to_q", "to_k", "to_v", "to_out.0"],
        init_lora_weights=False,
    )
    pipeline.unet.add_adapter(config)
    layers = get_peft_model_state_dict(pipeline.unet)
    type(pipeline).save_lora_weights(
        file.parent, layers, weight_name=file.name, unet_lora_adapter_metadata=config.to_dict()
    )


def with_rank_stabilised_scaling(pipeline: Any, file: Path) -> None:
    targets = ["to_k", "to_v"]
    config = LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=targets, init_lora_weights=False)
    pipeline.unet.add_adapter(config)
    layers = get_peft_model_state_dict(pipeline.unet)
    type(pipeline).save_lora_weights(
        file.parent, layers, weight_name=file.name, unet_lora_adapter_metadata=config.to_dict()
    )


def of_kohya(pipeline: Any, file: Path, alpha: Callable[[str], float] = lambda _path: 2.0) -> None:
    """The format of most trainers: paths with underscores, an alpha per layer, and the text encoder."""
    state: lora.State = {}
    for prefix, component, wanted in (
        ("lora_unet", "unet", lora.attention),
        ("lora_te", "text_encoder", lambda path: path.endswith(("q_proj", "out_proj", "fc1"))),
    ):
        for name, tensor in lora.weights(getattr(pipeline, component), 3, wanted).items():
            path, _, half = name.partition(".lora_")
            path = path if component == "unet" or path.startswith("text_model") else f"text_model.{path}"
            key = f"{prefix}_{path.replace('.', '_')}"
            state[f"{key}.lora_{'down' if half.startswith('A') else 'up'}.weight"] = tensor
            state[f"{key}.alpha"] = torch.tensor(alpha(path))
    save_file(state, file)


def of_wan(pipeline: Any, file: Path, rank: int = lora.RANK) -> None:
    """The format of Wan's trainers, with biases."""
    state: lora.State = {}
    for name, tensor in lora.weights(pipeline.transformer, 4, lora.attention, rank).items():
        path, _, half = name.partition(".lora_")
        path = path.replace("attn1", "self_attn").replace("attn2", "cross_attn")
        for ours, theirs in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o")):
            path = path.removesuffix(ours) + theirs if path.endswith(ours) else path
        state[f"diffusion_model.{path}.lora_{half}"] = tensor
        if half.startswith("B"):
            state[f"diffusion_model.{path}.diff_b"] = torch.linspace(-1, 1, tensor.shape[0])
    save_file(state, file)


def of_wan_distillation(pipeline: Any, file: Path) -> None:
    """With what files of distilled models have beside LoRA weights: a whole last layer, lone biases, and norms.

    All ranks are that of the last layer: without alphas, diffusers 0.42 divides by the most common one.
    """
    last = pipeline.transformer.proj_out
    of_wan(pipeline, file, last.out_features)
    state = load_file(file)
    rng = torch.Generator().manual_seed(6)
    state["diffusion_model.head.head.diff"] = torch.randn(last.weight.shape, generator=rng) * 0.1
    state["diffusion_model.head.head.diff_b"] = torch.randn(last.bias.shape, generator=rng)
    state["diffusion_model.blocks.0.norm3.diff"] = torch.randn(32, generator=rng)
    state["diffusion_model.blocks.1.self_attn.norm_q.diff"] = torch.zeros(32)
    save_file(state, file)


def of_xlabs(pipeline: Any, file: Path) -> None:
    """XLabs' format of FLUX: queries, keys and values in one weight."""
    attention, rng = pipeline.transformer.transformer_blocks[0].attn, torch.Generator().manual_seed(7)
    state: lora.State = {}
    for name, rows in (("proj_lora1", 1), ("qkv_lora1", 3), ("qkv_lora2", 3)):
        features = attention.to_q.in_features
        state[f"double_blocks.0.processor.{name}.down.weight"] = torch.randn(lora.RANK, features, generator=rng) * 0.2
        state[f"double_blocks.0.processor.{name}.up.weight"] = torch.randn(rows * features, lora.RANK, generator=rng)
    save_file(state, file)


@pytest.mark.parametrize(
    ("model", "write", "changed"),
    [
        ("sd", old_names, ["text_encoder", "unet"]),
        ("sd", with_configuration, ["unet"]),
        ("sd", with_rank_stabilised_scaling, ["unet"]),
        ("sd", of_kohya, ["text_encoder", "unet"]),
        ("wan-2.1-t2v", of_wan, ["transformer"]),
        ("wan-2.1-t2v", of_wan_distillation, ["transformer"]),
        ("flux", of_xlabs, ["transformer"]),
    ],
)
@torch.no_grad()
def test_a_file_changes_the_same_layers_as_with_diffusers_and_peft(
    model: str, write: Write, changed: list[str], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Scales by alpha, rank, layer and metadata, biases and convolutions are equal."""
    folder, file = tiny_model(model), tmp_path / "file.safetensors"
    write(opened(folder), file)
    theirs, ours = opened(folder), opened(folder)
    theirs.load_lora_weights(str(tmp_path), weight_name=file.name)
    changes = changes_of(ours, file)
    assert sorted(changes) == changed
    for component in changed:
        module = getattr(ours, component)
        before = module_output(component, module)
        adapters = RowAdapters(module)
        adapters.attach(KEY, changes[component])
        with adapters.applied([KEY, ()], [1, 1], merge=True):
            after = module_output(component, module)
        expected = module_output(component, getattr(theirs, component))
        torch.testing.assert_close(after[:1], expected[:1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(after[1:], before[1:], atol=1e-6, rtol=1e-5)
        assert (expected[:1] - before[:1]).abs().max() > 1e-2
        adapters.detach(KEY)
        torch.testing.assert_close(module_output(component, module), before)


def test_every_layer_has_its_own_alpha(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """diffusers 0.42 applies the most common alpha of a trainer's file to all layers, unlike the file."""
    pipeline, file = opened(tiny_model("sd")), tmp_path / "file.safetensors"
    of_kohya(pipeline, file, alpha=lambda path: 1.5 if path.endswith(("to_k", "fc1")) else 6.0)
    plain = lora.weights(pipeline.unet, 3, lora.attention)
    for path, change in changes_of(pipeline, file)["unet"].items():
        scale = (1.5 if path.endswith("to_k") else 6.0) / lora.RANK
        torch.testing.assert_close(change.up, scale * plain[f"{path}.lora_B.weight"])
        torch.testing.assert_close(change.down, plain[f"{path}.lora_A.weight"])


def test_the_models_file_selects_one_of_two_denoisers(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Files for the second denoiser name the first, so the models file says which one is meant."""
    pipeline = opened(tiny_model("wan-2.2-t2v"))
    file = lora.save(pipeline, tmp_path / "low.safetensors", 1)
    assert list(changes_of(pipeline, file)) == ["transformer"]
    assert list(changes_of(pipeline, file, component="transformer_2")) == ["transformer_2"]


@pytest.mark.parametrize("model", ["wan-2.1-t2v", "wan-2.2-ti2v"])
@torch.no_grad()
def test_rows_of_a_video_model_have_their_own_adapters(
    model: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """One adapter, none, another and both in one forward of Wan's denoiser: each row equals that of PEFT.

    TI2V embeds a time for every token: its layers for that are given many entries a row.
    """
    folder = tiny_model(model)
    ours, theirs = opened(folder), opened(folder)
    files = {name: lora.save(ours, tmp_path / f"{name}.safetensors", at) for at, name in enumerate("ab")}
    for name, file in files.items():
        theirs.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name=name)
    (method,) = shared_methods_of("transformer", ours.transformer).values()
    changes = {name: changes_of(ours, file) for name, file in files.items()}
    rows: list[dict[str, float]] = [{"a": 1.0}, {}, {"b": 1.0}, {"a": 0.5, "b": -0.7}]
    keys = [tuple(row.items()) for row in rows]
    for key, row in zip(keys, rows, strict=True):
        if row:
            both = combine([(changes[name], scale) for name, scale in row.items()], ours.components)
            method.adapters.attach(key, both["transformer"])

    rng = torch.Generator().manual_seed(9)
    latents = torch.randn(4, 4, 3, 8, 8, generator=rng)
    times = torch.tensor([900.0, 500.0, 300.0, 7.0])
    if model == "wan-2.2-ti2v":
        times = times[:, None] * torch.ones(4, 3 * 4 * 4)
    text = torch.randn(4, 6, 32, generator=rng)
    with method.adapters.applied(keys, [1] * 4, merge=True):
        fused = method.run(latents, times, text, return_dict=False)[0]
    for at, row in enumerate(rows):
        if row:
            theirs.transformer.enable_adapters()
            theirs.set_adapters(list(row), list(row.values()))
        else:
            theirs.transformer.disable_adapters()
        mine = slice(at, at + 1)
        solo = theirs.transformer(latents[mine], times[mine], text[mine], return_dict=False)[0]
        torch.testing.assert_close(fused[mine], solo, atol=1e-5, rtol=1e-4)


def test_a_loaded_model_takes_a_file_with_the_older_names_of_its_text_encoder(
    tmp_path: Path, tiny_models: Path
) -> None:
    """What the engine adds to the encoder does not count as a level of its names."""
    of_kohya(opened(tiny_models / "sd"), tmp_path / "lora.safetensors")
    spec = a_spec(tiny_models / "sd", adapter=(AdapterSpec(id="file", source=str(tmp_path)),))
    recorder = EngineHarness(spec).run(a_job("one", steps=2, adapters=(Adapter(id="file"),)))
    assert recorder.finished["one"].error is None


def of_flux(pipeline: Any, *layers: tuple[str, str]) -> lora.State:
    """Return kohya's weights of layers of FLUX, each by its name in the file and its path, with an alpha of 6."""
    rng = torch.Generator().manual_seed(8)
    state: lora.State = {}
    for name, path in (("lora_unet_double_blocks_0_img_attn_proj", "transformer_blocks.0.attn.to_out.0"), *layers):
        layer = pipeline.transformer.get_submodule(path)
        state[f"{name}.lora_down.weight"] = torch.randn(lora.RANK, layer.in_features, generator=rng)
        state[f"{name}.lora_up.weight"] = torch.randn(layer.out_features, lora.RANK, generator=rng)
        state[f"{name}.alpha"] = torch.tensor(6.0)
    return state


def test_layers_that_diffusers_reads_without_their_component_are_applied(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """diffusers 0.42 drops these layers of FLUX, and the alpha of the last ones."""
    pipeline, file = opened(tiny_model("flux")), tmp_path / "file.safetensors"
    layers = {"lora_unet_img_in": "x_embedder", "lora_unet_final_layer_linear": "proj_out"}
    state = of_flux(pipeline, *layers.items())
    save_file(state, file)
    read_file = file_of(pipeline, file)
    assert read_file.warnings == ()
    for name, path in layers.items():
        change = read_file.changes["transformer"][path]
        assert change.down is not None
        assert change.up is not None
        expected = 6.0 / lora.RANK * (state[f"{name}.lora_up.weight"] @ state[f"{name}.lora_down.weight"])
        torch.testing.assert_close(change.up @ change.down, expected)


@pytest.mark.parametrize(
    ("model", "name", "shape"),
    [
        ("flux", "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q.lora_up.weight", (32, 3)),
        ("flux", "lora_te3_encoder_block_0_layer_0_SelfAttention_q.lora_up.weight", (32, 3)),
        ("flux", "lora_unet_double_blocks_0_img_attn_proj.diff_b", (32,)),
        ("flux", "lora_te_text_projection.lora_up.weight", (32, 3)),
        ("wan-2.1-t2v", "diffusion_model.blocks.0.diff_m", (1, 6, 32)),
        ("wan-2.1-t2v", "diffusion_model.blocks.0.norm3.diff", (32,)),
        ("wan-2.1-t2v", "diffusion_model.patch_embedding.diff", (4, 4)),
    ],
)
def test_weights_that_diffusers_drops_are_named(
    model: str, name: str, shape: tuple[int, ...], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    pipeline, file = opened(tiny_model(model)), tmp_path / "file.safetensors"
    if model == "flux":
        save_file(of_flux(pipeline), file)
    else:
        of_wan(pipeline, file)
    known = load_file(file)
    save_file(known | {name: torch.zeros(shape)}, file)
    assert file_of(pipeline, file).warnings == ()
    save_file(known | {name: torch.ones(shape)}, file)
    (warning,) = file_of(pipeline, file).warnings
    assert name in warning


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.model.transformer."])
def test_a_file_of_peft_changes_the_denoiser(prefix: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """With the alpha of the configuration beside it; without one, the rank is used, which a warning says."""
    pipeline, file = opened(tiny_model("flux")), tmp_path / "adapter_model.safetensors"
    plain = lora.weights(pipeline.transformer, 3, lora.attention)
    save_file({f"{prefix}{name}": tensor for name, tensor in plain.items()}, file)
    without = file_of(pipeline, file)
    assert "alpha" in without.warnings[0]
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 12, "r": 3, "use_rslora": false}')
    with_alpha = file_of(pipeline, file)
    assert with_alpha.warnings == ()
    for path, change in with_alpha.changes["transformer"].items():
        assert change.up is not None
        torch.testing.assert_close(change.up, 4 * plain[f"{path}.lora_B.weight"])
        torch.testing.assert_close(without.changes["transformer"][path].up, plain[f"{path}.lora_B.weight"])
    assert len(with_alpha.changes["transformer"]) == len(plain) / 2


def test_a_job_says_which_weights_of_its_adapter_are_left_out(tmp_path: Path, tiny_models: Path) -> None:
    pipeline = opened(tiny_models / "flux")
    save_file(
        of_flux(pipeline) | {"lora_te_text_projection.lora_up.weight": torch.ones(32, 3)}, tmp_path / "a.safetensors"
    )
    spec = a_spec(tiny_models / "flux", adapter=(AdapterSpec(id="file", source=str(tmp_path)),))
    recorder = EngineHarness(spec).run(
        a_job("with", steps=1, adapters=(Adapter(id="file"),)), a_job("without", steps=1)
    )
    (warning,) = recorder.finished["with"].warnings
    assert warning.param == "adapters"
    assert "'file': 1 of its weights, such as lora_te_text_projection" in warning.message
    assert recorder.finished["without"].warnings == ()


def test_a_bias_without_weights_is_read(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """diffusers 0.42 fills the weights of such a layer with what is in memory."""
    pipeline, file = opened(tiny_model("wan-2.1-t2v")), tmp_path / "file.safetensors"
    of_wan(pipeline, file)
    bias = torch.linspace(-1, 1, pipeline.transformer.blocks[0].ffn.net[2].out_features)
    save_file(load_file(file) | {"diffusion_model.blocks.0.ffn.2.diff_b": bias}, file)
    change = changes_of(pipeline, file)["transformer"]["blocks.0.ffn.net.2"]
    assert (change.down, change.up) == (None, None)
    torch.testing.assert_close(change.bias, bias)


def test_a_rank_that_a_reader_makes_of_other_weights_counts(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """No name of the file says that Wan's whole last layer becomes a matrix of its rows' rank."""
    pipeline, file = opened(tiny_model("wan-2.1-t2v")), tmp_path / "file.safetensors"
    of_wan(pipeline, file)
    last, state = pipeline.transformer.proj_out, load_file(file)
    state["diffusion_model.head.head.diff"] = torch.ones(513, last.in_features)
    state["diffusion_model.head.head.diff_b"] = torch.ones(last.out_features)
    save_file(state, file)
    with pytest.raises(AdapterUnavailable, match=r"transformer\.proj_out is 513; at most 512"):
        check_rank(changes_of(pipeline, file))
