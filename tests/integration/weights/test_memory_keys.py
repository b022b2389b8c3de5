"""Keys that save memory: fused images equal solo ones with each, weights take fewer bytes, decodes are divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.models.autoencoders.vae import Decoder
from harness.adapters import adapters_of, load_pipeline, mixable, spec_with
from harness.engine import DIFFUSERS_AND_NUMPY, a_job, a_spec
from parity.against_solo import mixed_jobs, run_batch, run_fused_and_solo
from safetensors.torch import save_file
from tiny import lora, lycoris

from shared.config.request_limits import Limits
from shared.errors import AdapterUnavailable
from shared.job import Job
from shared.tasks import Task
from worker.engine.models.adapter_loader import changes_for
from worker.engine.pipelines.loading import load, locate
from worker.engine.weights.memory import save_memory

pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("shared_models"),
]
CPU = torch.device("cpu")
CAST: Mapping[str, Any] = {"layerwise_casting": "float8_e4m3fn"}
ALL: Mapping[str, Any] = {**CAST, "vae_tiling": True, "vae_slicing": True}


@pytest.fixture
def decoder_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of a VAE's decoder."""
    rows: list[int] = []
    forward = Decoder.forward

    def counted(self: Any, sample: torch.Tensor, *args: Any) -> torch.Tensor:
        rows.append(sample.shape[0])
        return forward(self, sample, *args)

    monkeypatch.setattr(Decoder, "forward", counted)
    return rows


def jobs() -> list[Job]:
    """Return two jobs for images that are larger than a tile."""
    return [job.model_copy(update={"width": 96, "height": 96}) for job in mixed_jobs()[:2]]


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_each_job_of_a_mixed_batch_gets_the_same_image_as_solo(family: str, tiny_models: Path) -> None:
    """The images are nearly those of whole weights and of whole decodes."""
    fused = run_fused_and_solo(a_spec(tiny_models / family, **ALL), jobs())
    for key, image in run_batch(a_spec(tiny_models / family), jobs()).images.items():
        difference = np.abs(fused.images[key] - image)
        assert difference.max() > 1e-4
        assert difference.mean() < 0.3


@pytest.mark.parametrize(("key", "rows", "same"), [("vae_slicing", {1}, True), ("vae_tiling", {1, 2}, False)])
def test_a_decode_is_divided(key: str, rows: set[int], same: bool, tiny_models: Path, decoder_rows: list[int]) -> None:
    """Slicing decodes row by row, tiling in several calls with all rows, which changes the seams."""
    full = run_batch(a_spec(tiny_models / "sd"), jobs())
    whole, decoder_rows[:] = len(decoder_rows), []
    divided = run_batch(a_spec(tiny_models / "sd", **{key: True}), jobs())
    assert set(decoder_rows) == rows
    assert len(decoder_rows) > whole
    differences = [np.abs(divided.images[name] - image).max() for name, image in full.images.items()]
    assert bool(max(differences) <= 1e-4) is same


def test_rows_of_cast_weights_have_their_own_adapters(tiny_models: Path, tmp_path: Path) -> None:
    pipeline = load_pipeline(tiny_models / "flux")
    files = {name: lora.save(pipeline, tmp_path / f"{name}.safetensors", at) for at, name in enumerate(("ink", "oil"))}
    adapted = [
        mixable(a_job(name, prompt="a dog", seed=3, steps=2, adapters=adapters_of((name, 1.0)))) for name in files
    ]
    fused = run_fused_and_solo(spec_with(tiny_models / "flux", files, **CAST), adapted)
    assert np.abs(fused.images["ink", 0] - fused.images["oil", 0]).max() > 1e-2


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_sizes_before_and_after_the_load_agree(family: str, tiny_models: Path) -> None:
    folder = tiny_models / family
    plain, cast = a_spec(folder), a_spec(folder, **CAST)
    loaded = {name: load(spec, folder, CPU).nbytes for name, spec in (("plain", plain), ("cast", cast))}
    assert loaded["cast"] == pytest.approx(locate(cast)[1], rel=0.1)
    assert loaded["cast"] < 0.9 * loaded["plain"]


@pytest.mark.parametrize(("family", "task"), [("sdxl", Task.TEXT_TO_IMAGE), ("ltx-video", Task.TEXT_TO_VIDEO)])
def test_vaes_are_on_the_device_while_the_other_weights_are_offloaded(
    family: str, task: Task, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their `decode` is no forward, so the hooks of the offloading would not move them; XL's is cast to `float32`."""

    def without_hooks(pipeline: Any, device: torch.device, exclude_modules: Sequence[str], **_options: Any) -> None:
        for name in exclude_modules:
            getattr(pipeline, name).to(device)

    monkeypatch.setattr(DiffusionPipeline, "enable_group_offload", without_hooks)  # its hooks need a GPU
    folder = tiny_model(family)
    limits = Limits(multiple_of=16, max_frames=9 if task.makes_video else 1)
    spec = a_spec(folder, tasks=(task,), limits=limits, dtype="float16", offload="group")
    model = load(spec, folder, torch.device("meta"))
    modules = {method.component: method.module for method in model.shared_methods}
    dtype = torch.float32 if family == "sdxl" else torch.float16
    assert {(weight.device.type, weight.dtype) for weight in modules.pop("vae").parameters()} == {("meta", dtype)}
    assert {weight.device.type for module in modules.values() for weight in module.parameters()} == {"cpu"}


def test_a_dora_is_refused_while_its_layers_weights_are_moved(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other adapters are not: they need no weights of the model."""
    monkeypatch.setattr(DiffusionPipeline, "enable_group_offload", lambda *_args, **_options: None)
    folder, layer = tiny_model("sd"), "unet.mid_block.attentions.0.proj_in"
    pipeline = load_pipeline(folder)
    module, rng = pipeline.unet.mid_block.attentions[0].proj_in, torch.Generator()
    loha, _ = lycoris.loha(module, rng)
    loha = {f"{layer}.{part}": tensor for part, tensor in loha.items()}
    save_file(loha, tmp_path / "loha.safetensors")
    save_file(loha | {f"{layer}.dora_scale": lycoris.norms(module.weight.detach(), rng)}, tmp_path / "dora.safetensors")
    files = {name: tmp_path / f"{name}.safetensors" for name in ("loha", "dora")}
    model = load(spec_with(folder, files, offload="group"), folder, CPU)
    changes_for(model, (("loha", 1.0),), CPU)
    with pytest.raises(AdapterUnavailable, match='DoRA needs the weights of its layers, and offload = "group"'):
        changes_for(model, (("dora", 1.0),), CPU)


class Whole(torch.nn.Module):
    """A module with none of diffusers' methods."""


@pytest.mark.parametrize(
    ("key", "value", "modules", "message"),
    [
        ("layerwise_casting", "float8_e5m2", {"unet": Whole()}, "layerwise_casting: Whole has no layers for it"),
        ("vae_tiling", True, {"vae": Whole()}, "vae_tiling: diffusers has none for Whole; remove the key"),
        ("vae_slicing", True, {}, "vae_slicing: diffusers has none for the model without a VAE; remove the key"),
    ],
)
def test_a_key_that_a_model_cannot_have_is_refused(
    key: str, value: Any, modules: dict[str, torch.nn.Module], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save_memory(modules, a_spec(Path("a"), **{key: value}), torch.float32)
