"""Models of one file: their images equal those of the folder that the file was made from, and wrong files are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers
from harness.engine import DIFFUSERS_AND_NUMPY, a_spec
from parity.against_solo import mixed_jobs, run_batch, run_fused_and_solo
from tiny import checkpoint_file, lora
from tiny.registry import save_tiny

from shared.config.checkpoints import checkpoint_fault, vae_fault
from shared.errors import LoadPostponed, ModelUnavailable
from worker.engine.pipelines.loading import load, locate

pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.usefixtures("shared_models"),
]
CPU = torch.device("cpu")
FAMILIES = ("sd", "sdxl", "sd3", "flux")
FLUX_WIDTH, TINY_WIDTH = 3072, 32


@pytest.fixture(autouse=True)
def tiny_flux(monkeypatch: pytest.MonkeyPatch) -> None:
    """Diffusers' conversion has the width of FLUX.1 as a constant."""
    convert = convert_flux_transformer_checkpoint_to_diffusers
    constants = tuple(TINY_WIDTH if one == FLUX_WIDTH else one for one in convert.__code__.co_consts)
    monkeypatch.setattr(convert, "__code__", convert.__code__.replace(co_consts=constants))


def pipeline_of(folder: Path) -> Any:
    return DiffusionPipeline.from_pretrained(folder, local_files_only=True)


def changed_copy(folder: Path, to: Path, *parts: str) -> Path:
    """Copy a pipeline without the weights of `parts`."""
    shutil.copytree(folder, to)
    for part in parts:
        for file in (to / part).glob("*.safetensors"):
            file.unlink()
    return to


PARTS = {"sd": ("unet", "vae", "text_encoder"), "sd3": ("transformer",), "flux": ("transformer",)}
PARTS["sdxl"] = (*PARTS["sd"], "text_encoder_2")


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_a_file_equal_those_of_the_folder_it_was_made_from(
    family: str, tiny_models: Path, tmp_path: Path
) -> None:
    """The folder of its configurations has weights only of the parts that the file lacks."""
    folder = tiny_models / family
    file = checkpoint_file.save(checkpoint_file.weights_of(pipeline_of(folder)), tmp_path / "a.safetensors")
    configs = changed_copy(folder, tmp_path / "configs", *PARTS[family])
    spec = a_spec(configs, checkpoint=str(file))
    fused = run_fused_and_solo(spec, mixed_jobs())
    for key, expected in run_batch(a_spec(folder), mixed_jobs()).images.items():
        assert np.abs(fused.images[key] - expected).max() <= 1e-4
    assert locate(spec)[1] == pytest.approx(locate(a_spec(folder))[1], rel=0.02)
    assert checkpoint_fault(file, configs) is None


@pytest.mark.usefixtures("quick_loads")
@pytest.mark.parametrize("named_twice", [False, True])
def test_a_file_of_flux_can_have_all_parts(named_twice: bool, tiny_models: Path, tmp_path: Path) -> None:
    """The embeddings of T5 have two names; a file has one or both."""
    folder = tiny_models / "flux"
    state = checkpoint_file.all_of_flux(pipeline_of(folder))
    t5 = "text_encoders.t5xxl.transformer."
    state.pop(f"{t5}encoder.embed_tokens.weight", None)
    if named_twice:
        state[f"{t5}encoder.embed_tokens.weight"] = state[f"{t5}shared.weight"]
    file = checkpoint_file.save(state, tmp_path / "a.safetensors")
    parts = ("transformer", "vae", "text_encoder", "text_encoder_2")
    images = run_batch(
        a_spec(changed_copy(folder, tmp_path / "configs", *parts), checkpoint=str(file)), mixed_jobs()
    ).images
    for key, expected in run_batch(a_spec(folder), mixed_jobs()).images.items():
        assert np.abs(images[key] - expected).max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_diffusers_from_single_file(family: str, tiny_models: Path, tmp_path: Path) -> None:
    pipeline = pipeline_of(tiny_models / family)
    file = checkpoint_file.save(checkpoint_file.weights_of(pipeline), tmp_path / "a.safetensors")
    part = PARTS[family][0]
    expected = type(getattr(pipeline, part)).from_single_file(
        str(file), config=str(tiny_models / family), subfolder=part, local_files_only=True
    )
    model = load(a_spec(tiny_models / family, checkpoint=str(file)), tiny_models / family, CPU)
    loaded = next(one for one in model.denoisers).module
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_weights_of_8_bits_are_loaded_as_the_dtype_of_the_model(tiny_models: Path, tmp_path: Path) -> None:
    folder = tiny_models / "flux"
    small = {
        name: tensor.to(torch.float8_e4m3fn) for name, tensor in checkpoint_file.weights_of(pipeline_of(folder)).items()
    }
    file = checkpoint_file.save(small, tmp_path / "fp8.safetensors")
    spec = a_spec(folder, checkpoint=str(file))
    model = load(spec, folder, CPU)
    assert {tensor.dtype for tensor in model.denoisers[0].module.parameters()} == {torch.float32}
    assert model.nbytes == pytest.approx(locate(spec)[1], rel=0.05)
    run_fused_and_solo(spec, mixed_jobs())


@pytest.mark.usefixtures("quick_loads")
def test_extra_weights_for_training_are_not_read(tiny_models: Path, tmp_path: Path) -> None:
    folder = tiny_models / "sd"
    state = checkpoint_file.weights_of(pipeline_of(folder))
    state |= {f"model_ema.{name.replace('.', '')}": torch.zeros_like(tensor) for name, tensor in state.items()}
    state["model_ema.decay"], state["betas"] = torch.zeros(()), torch.zeros(1000)
    spec = a_spec(folder, checkpoint=str(checkpoint_file.save(state, tmp_path / "ema.safetensors")))
    images = run_batch(spec, mixed_jobs()).images
    for key, expected in run_batch(a_spec(folder), mixed_jobs()).images.items():
        assert np.abs(images[key] - expected).max() <= 1e-4


@pytest.mark.usefixtures("quick_loads")
def test_a_file_of_the_denoiser_alone_needs_no_prefix(tiny_models: Path, tmp_path: Path) -> None:
    folder = tiny_models / "sd"
    pipeline = pipeline_of(folder)
    with torch.no_grad():
        pipeline.unet.conv_out.weight.mul_(-1)
    pipeline.save_pretrained(tmp_path / "expected")
    expected = run_batch(a_spec(tmp_path / "expected"), mixed_jobs()).images
    for name, state in (("original", checkpoint_file.unet(pipeline.unet)), ("diffusers", pipeline.unet.state_dict())):
        file = checkpoint_file.save(state, tmp_path / f"{name}.safetensors")
        images = run_batch(a_spec(folder, checkpoint=str(file)), mixed_jobs()).images
        assert all(np.abs(images[key] - image).max() <= 1e-4 for key, image in expected.items())


@pytest.mark.usefixtures("quick_loads")
@pytest.mark.parametrize("form", ["original", "diffusers", "folder"])
def test_a_vae_replaces_that_of_the_source(form: str, tiny_models: Path, tmp_path: Path) -> None:
    folder = tiny_models / "sd"
    other: AutoencoderKL = pipeline_of(folder).vae
    with torch.no_grad():
        other.decoder.conv_out.weight.mul_(-1)
    if form == "folder":
        other.save_pretrained(tmp_path / "vae")
    path = tmp_path / "vae"
    if form != "folder":
        state = checkpoint_file.vae(other) if form == "original" else dict(other.state_dict())
        path = checkpoint_file.save(state, tmp_path / "vae.safetensors")
    file = checkpoint_file.save(checkpoint_file.weights_of(pipeline_of(folder)), tmp_path / "a.safetensors")
    whole = pipeline_of(folder)
    whole.vae = other
    whole.save_pretrained(tmp_path / "expected")
    expected = run_batch(a_spec(tmp_path / "expected"), mixed_jobs()).images
    for spec in (a_spec(folder, vae=str(path)), a_spec(folder, vae=str(path), checkpoint=str(file))):
        images = run_batch(spec, mixed_jobs()).images
        assert all(np.abs(images[key] - image).max() <= 1e-4 for key, image in expected.items())
        assert locate(spec)[1] == pytest.approx(locate(a_spec(folder))[1], rel=0.02)
    assert vae_fault(path, folder) is None


Make = Callable[[Path, Path], Path]  # of a folder of tiny models, and an empty one


def _lacking(models: Path, to: Path) -> Path:
    state = checkpoint_file.weights_of(pipeline_of(models / "sd"))
    return checkpoint_file.save(
        {name: one for name, one in state.items() if "middle_block.1" not in name}, to / "a.safetensors"
    )


def _lacking_first(models: Path, to: Path) -> Path:
    state = checkpoint_file.weights_of(pipeline_of(models / "sd"))
    return checkpoint_file.save(
        {name: one for name, one in state.items() if "encoder.mid" not in name}, to / "a.safetensors"
    )


def _truncated(models: Path, to: Path) -> Path:
    file = checkpoint_file.save(checkpoint_file.weights_of(pipeline_of(models / "sd")), to / "a.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    return file


def _text(_models: Path, to: Path) -> Path:
    (to / "a.safetensors").write_text("<html>please log in</html>" * 100)
    return to / "a.safetensors"


def _lora(models: Path, to: Path) -> Path:
    return lora.save(pipeline_of(models / "sd"), to / "a.safetensors", 0, ("unet",))


def build(family: str, to: Path) -> Any:
    return pipeline_of(save_tiny(family, to / f"{family}-whole"))


def _of(family: str) -> Make:
    def make(_models: Path, to: Path) -> Path:
        return checkpoint_file.save(checkpoint_file.weights_of(build(family, to)), to / "a.safetensors")

    return make


def _scaled(models: Path, to: Path) -> Path:
    state = checkpoint_file.weights_of(pipeline_of(models / "sd")) | {
        "model.diffusion_model.out.2.scale_weight": torch.ones(1)
    }
    return checkpoint_file.save(state, to / "a.safetensors")


def _pickle(_models: Path, to: Path) -> Path:
    torch.save({}, to / "a.ckpt")
    return to / "a.ckpt"


@pytest.mark.parametrize(
    ("make", "source", "fault", "seen_in_header"),
    [
        (_lacking, "sd", "unet has no weights for mid_block.attentions.0", False),
        (_lacking_first, "sd", "vae has no weights for encoder.mid_block", False),
        (_truncated, "sd", "it ends after", True),
        (_text, "sd", "its header cannot be read", True),
        (_lora, "sd", "it is a LoRA file, not a checkpoint; make it a [[model.adapter]]", True),
        (_scaled, "sd", "its weights are quantized with scales, which are not read", True),
        (_pickle, "sd", "it is no .safetensors file", True),
        (
            _of("flux"),
            "sd",
            "it has no weights of a UNet2DConditionModel, the unet of source; it looks like FLUX.1",
            True,
        ),
        (_of("sd"), "flux", "the transformer of source; it looks like Stable Diffusion 1.x", True),
        (_of("sdxl"), "sd", "it looks like Stable Diffusion XL", True),
        (_of("sd"), "sdxl", "source is a Stable Diffusion XL; it looks like Stable Diffusion 1.x", True),
        (_of("flux"), "flux-schnell", "it has weights of a guidance_embedder and source has none", False),
        (_of("flux-schnell"), "flux", "transformer has no weights for time_text_embed.guidance_embedder", False),
        (lambda _models, to: to / "none.safetensors", "sd", "there is no such file", True),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(
    make: Make, source: str, fault: str, seen_in_header: bool, tiny_models: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").touch()  # else its file system seems not to be mounted
    folder = tiny_models / source
    if not folder.is_dir():
        folder = save_tiny(source, tmp_path / source)
    file = make(tiny_models, tmp_path)
    spec = a_spec(folder, checkpoint=str(file))
    with pytest.raises(ModelUnavailable) as caught:
        load(spec, locate(spec)[0], CPU)
    assert not isinstance(caught.value, LoadPostponed)
    assert fault in caught.value.message
    assert f"checkpoint {file}: " in caught.value.message
    seen = checkpoint_fault(file, folder)
    assert (seen is not None and fault in seen) is seen_in_header


def test_a_file_whose_place_is_empty_is_awaited(tiny_models: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadPostponed, match=r"mounted\?"):
        locate(a_spec(tiny_models / "sd", checkpoint=str(tmp_path / "a.safetensors")))


def test_a_vae_with_other_latents_is_refused(tiny_models: Path, tmp_path: Path) -> None:
    vae = tmp_path / "vae"
    shutil.copytree(tiny_models / "sd" / "vae", vae)
    config = json.loads((vae / "config.json").read_text())
    (vae / "config.json").write_text(json.dumps(config | {"latent_channels": 16}))
    with pytest.raises(ModelUnavailable, match="its latents have 16 channels, and those of source 4"):
        load(a_spec(tiny_models / "sd", vae=str(vae)), tiny_models / "sd", CPU)
