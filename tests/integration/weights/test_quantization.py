"""Quantized weights: fused images equal solo ones, the weights are smaller, and what is lacking is named.

torchao and gguf are optional: without them their tests are skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from harness.adapters import adapters_of, mixable, spec_with
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder, a_job, a_spec
from parity.against_solo import mixed_jobs, run_batch, run_fused_and_solo
from safetensors.torch import save_file
from tiny import gguf_file, lora

from shared.config.weight_formats import Quantization
from shared.errors import AdapterUnavailable, ModelUnavailable
from worker.engine.pipelines.loading import load, locate

pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("shared_models"),
]
CPU = torch.device("cpu")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def assert_like(fused: EventRecorder, full: EventRecorder, most: float) -> None:
    """The weights have been quantized, and the images are nearly those of the full weights."""
    differences = [np.abs(fused.images[key] - image) for key, image in full.images.items()]
    assert all(difference.max() > 1e-4 for difference in differences)
    assert all(difference.mean() < most for difference in differences)


@needs("torchao")
@pytest.mark.parametrize(
    ("family", "weight_format", "most"),
    [
        pytest.param("sd", "torchao-int8", 0.1, marks=pytest.mark.slow),
        pytest.param("sd3", "torchao-int8", 0.1, marks=pytest.mark.slow),
        ("flux", "torchao-int8", 0.1),
        ("sd", "torchao-fp8", 0.3),
    ],
)
def test_each_job_of_a_mixed_batch_gets_the_same_image_as_solo(
    family: str, weight_format: Any, most: float, tiny_models: Path
) -> None:
    quantization = Quantization(denoiser=weight_format, text_encoder=weight_format)
    fused = run_fused_and_solo(a_spec(tiny_models / family, quantization=quantization), mixed_jobs())
    full = run_batch(a_spec(tiny_models / family), mixed_jobs())
    assert_like(fused, full, most)


@needs("torchao")
def test_rows_of_quantized_weights_have_their_own_adapters(tiny_models: Path, tmp_path: Path) -> None:
    pipeline: Any = DiffusionPipeline.from_pretrained(tiny_models / "flux", local_files_only=True)
    files = {name: lora.save(pipeline, tmp_path / f"{name}.safetensors", at) for at, name in enumerate(("ink", "oil"))}
    spec = spec_with(tiny_models / "flux", files, quantization=Quantization(denoiser="torchao-int8"))
    jobs = [
        mixable(a_job("none", prompt="a dog")),
        mixable(a_job("ink", prompt="a dog", seed=3, adapters=adapters_of(("ink", 1.0)))),
        mixable(a_job("oil", prompt="a dog", seed=3, adapters=adapters_of(("oil", 1.0)))),
    ]
    fused = run_fused_and_solo(spec, jobs)
    assert np.abs(fused.images["ink", 0] - fused.images["oil", 0]).max() > 1e-2


@needs("torchao")
def a_dora(folder: Path, file: Path) -> Path:
    """Write norms beside a LoRA of some layers, which halve the output of each."""
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    state: lora.State = {}
    for name, tensor in lora.weights(pipeline.transformer, 1, lora.attention).items():
        path = name.partition(".lora_")[0]
        weight = pipeline.transformer.get_submodule(path).weight.detach()
        state[f"transformer.{name}"] = tensor * 0.01
        state[f"transformer.{path}.dora_scale"] = weight.norm(dim=1, keepdim=True) / 2
    save_file(state, file)
    return file


@needs("torchao")
def test_norms_of_a_dora_are_those_of_rounded_weights(tiny_models: Path, tmp_path: Path) -> None:
    """Its images with quantized weights are nearly those with the full ones."""
    folder = tiny_models / "flux"
    files = {"ink": a_dora(folder, tmp_path / "dora.safetensors")}
    jobs = [mixable(a_job("dora", adapters=adapters_of(("ink", 1.0)))), mixable(a_job("none"))]
    rounded = run_batch(spec_with(folder, files, quantization=Quantization(denoiser="torchao-int8")), jobs)
    full = run_batch(spec_with(folder, files), jobs)
    assert np.abs(full.images["dora", 0] - full.images["none", 0]).max() > 1e-2
    assert_like(rounded, full, 0.1)


@needs("gguf")
def test_a_dora_of_packed_weights_is_refused(tiny_models: Path, tmp_path: Path) -> None:
    folder = tiny_models / "flux"
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    packed = Quantization(gguf={"transformer": str(gguf_file.save(pipeline.transformer, tmp_path / "flux-q8.gguf"))})
    spec = spec_with(folder, {"ink": a_dora(folder, tmp_path / "dora.safetensors")}, quantization=packed)
    failed = EngineHarness(spec).run(a_job("dora", adapters=adapters_of(("ink", 1.0)))).finished["dora"].error
    assert isinstance(failed, AdapterUnavailable)
    assert "DoRA needs the weights of transformer." in failed.message


@needs("gguf")
def test_weights_of_a_gguf_file_replace_those_of_the_folder(tiny_models: Path, tmp_path: Path) -> None:
    pipeline: Any = DiffusionPipeline.from_pretrained(tiny_models / "flux", local_files_only=True)
    file = gguf_file.save(pipeline.transformer, tmp_path / "flux-q8.gguf")
    quantization = Quantization(gguf={"transformer": str(file)}, text_encoder="torchao-int8")
    fused = run_fused_and_solo(a_spec(tiny_models / "flux", quantization=quantization), mixed_jobs())
    assert_like(fused, run_batch(a_spec(tiny_models / "flux"), mixed_jobs()), 0.1)


@needs("torchao")
def test_sizes_before_and_after_the_load_agree(tiny_models: Path) -> None:
    """Both count a quantized matrix with one byte per weight."""
    folder = tiny_models / "flux"
    plain = a_spec(folder)
    small = a_spec(folder, quantization=Quantization(denoiser="torchao-int8", text_encoder="torchao-int8"))
    expected, loaded = {}, {}
    for name, spec in (("plain", plain), ("small", small)):
        _, expected[name] = locate(spec)
        loaded[name] = load(spec, folder, CPU).nbytes
    assert loaded["plain"] == pytest.approx(expected["plain"], rel=0.05)
    assert loaded["small"] == pytest.approx(expected["small"], rel=0.1)
    assert loaded["small"] < 0.8 * loaded["plain"]


@pytest.mark.parametrize(
    ("installed", "quantization", "message"),
    [
        (False, Quantization(denoiser="torchao-int8"), "needs torchao, which is not installed; pip install 'fusequeue"),
        (False, Quantization(text_encoder="bitsandbytes-nf4"), 'text_encoder = "bitsandbytes-nf4" needs bitsandbytes'),
        (False, Quantization(gguf={"unet": "/none.gguf"}), "quantization.gguf needs gguf, which is not installed"),
        (True, Quantization(denoiser="bitsandbytes-int8"), "needs a GPU; use torchao on a CPU"),
        (True, Quantization(gguf={"transformer": "/none.gguf"}), "it has no transformer; it has"),
        (True, Quantization(gguf={"unet": "/none.gguf"}), "no such file: /none.gguf"),
    ],
)
def test_what_a_load_lacks_is_named(
    installed: bool, quantization: Quantization, message: str, tiny_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engine.weights.requirements.is_installed", lambda _package: installed)
    with pytest.raises(ModelUnavailable) as caught:
        load(a_spec(tiny_models / "sd", quantization=quantization), tiny_models / "sd", CPU)
    assert message in caught.value.message
