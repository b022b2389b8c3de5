"""LoRA files of all formats give rows the same changes as diffusers and PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from harness.engine import EngineHarness, a_job, a_spec
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from tiny import lora

from shared.config.adapters import Adapter, AdapterSpec
from worker.engine.fusion.module_proxy import shared_methods_of
from worker.engine.lora.adapter_files import Changes, check_fit, combine, locate, move, read
from worker.engine.lora.per_row import AdapterKey, RowAdapters

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")

KEY: AdapterKey = (("file", 1.0),)
CPU = torch.device("cpu")
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


def of_wan(pipeline: Any, file: Path) -> None:
    """The format of Wan's trainers, with biases."""
    state: lora.State = {}
    for name, tensor in lora.weights(pipeline.transformer, 4, lora.attention).items():
        path, _, half = name.partition(".lora_")
        path = path.replace("attn1", "self_attn").replace("attn2", "cross_attn")
        for ours, theirs in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o")):
            path = path.removesuffix(ours) + theirs if path.endswith(ours) else path
        state[f"diffusion_model.{path}.lora_{half}"] = tensor
        if half.startswith("B"):
            state[f"diffusion_model.{path}.diff_b"] = torch.linspace(-1, 1, tensor.shape[0])
    save_file(state, file)


def changes_of(pipeline: Any, file: Path, **fields: Any) -> Changes:
    spec = AdapterSpec(id="file", source=str(file.parent), weight_name=file.name, **fields)
    changes = read(spec, locate(spec), pipeline)
    check_fit(changes, pipeline.components)
    return move(combine([(changes, 1.0)]), pipeline.components, CPU)


def call(component: str, module: torch.nn.Module) -> Any:
    """Return the output of a module for two random rows."""
    rng = torch.Generator().manual_seed(9)
    if component == "text_encoder":
        return module(input_ids=torch.arange(20).reshape(2, 10)).last_hidden_state
    latents = (2, 4, 1, 8, 8) if component == "transformer" else (2, 4, 8, 8)
    text = torch.randn(2, 6, 32, generator=rng)
    return module(torch.randn(latents, generator=rng), torch.tensor([7.0, 300.0]), text, return_dict=False)[0]


@pytest.mark.parametrize(
    ("model", "write", "changed"),
    [
        ("sd", old_names, ["text_encoder", "unet"]),
        ("sd", with_configuration, ["unet"]),
        ("sd", with_rank_stabilised_scaling, ["unet"]),
        ("sd", of_kohya, ["text_encoder", "unet"]),
        ("wan-2.1-t2v", of_wan, ["transformer"]),
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
        before = call(component, module)
        adapters = RowAdapters(module)
        adapters.attach(KEY, changes[component])
        with adapters.applied([KEY, ()], [1, 1], merge=True):
            after = call(component, module)
        expected = call(component, getattr(theirs, component))
        torch.testing.assert_close(after[:1], expected[:1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(after[1:], before[1:], atol=1e-6, rtol=1e-5)
        assert (expected[:1] - before[:1]).abs().max() > 1e-2
        adapters.detach(KEY)
        torch.testing.assert_close(call(component, module), before)


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
            both = combine([(changes[name], scale) for name, scale in row.items()])
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
