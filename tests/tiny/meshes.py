"""Tiny models of hy3dgen's own classes, in the layout of Tencent's repositories: random weights whose volumes have a
surface."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from tiny.weights import SEED, spread

PACKAGES = ("cv2", "einops", "hy3dgen", "skimage", "trimesh")
_SHAPES = "hy3dgen.shapegen"
_ENCODER = {
    "type": "DinoImageEncoder",
    "kwargs": {
        "config": {
            **{"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "mlp_ratio": 2},
            **{"image_size": 28, "patch_size": 14, "num_channels": 3, "layerscale_value": 1.0},
        },
        "image_size": 28,
    },
}


def hy3dgen_fault() -> str | None:
    """Return why models of meshes cannot be run, None if they can."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} is not installed; `make mesh` installs it" if missing else None


needs_hy3dgen = pytest.mark.skipif(hy3dgen_fault() is not None, reason=str(hy3dgen_fault()))


def configuration(*, turbo: bool = False, views: bool = False) -> dict[str, Any]:
    """Return the configuration of the model, of its distilled variant, or of that of several views."""
    encoder = {**_ENCODER, "type": "DinoImageEncoderMV"} if views else _ENCODER
    scheduler = "ConsistencyFlowMatchEulerDiscreteScheduler" if turbo else "FlowMatchEulerDiscreteScheduler"
    steps = {"pcm_timesteps": 100} if turbo else {}
    model = {
        **{"in_channels": 8, "context_in_dim": 16, "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2},
        **{"depth": 1, "depth_single_blocks": 1, "axes_dim": [16], "theta": 10000, "qkv_bias": True},
        **({"guidance_embed": True} if turbo else {}),
    }
    vae = {
        **{"num_latents": 12, "embed_dim": 8, "num_freqs": 4, "include_pi": False, "heads": 2, "width": 32},
        **{"num_decoder_layers": 1, "qkv_bias": False, "qk_norm": True, "scale_factor": 0.99},
    }
    return {
        "model": {"target": f"{_SHAPES}.models.Hunyuan3DDiT", "params": model},
        "vae": {"target": f"{_SHAPES}.models.ShapeVAE", "params": vae},
        "conditioner": {
            "target": f"{_SHAPES}.models.SingleImageEncoder",
            "params": {"main_image_encoder": encoder},
        },
        "scheduler": {"target": f"{_SHAPES}.schedulers.{scheduler}", "params": {"num_train_timesteps": 1000, **steps}},
        "image_processor": {
            "target": f"{_SHAPES}.preprocessors.{'MVImageProcessorV2' if views else 'ImageProcessorV2'}",
            "params": {"size": 56},
        },
        "pipeline": {"target": f"{_SHAPES}.pipelines.Hunyuan3DDiTFlowMatchingPipeline"},
    }


def save_mesh_model(folder: Path, *, turbo: bool = False, views: bool = False) -> Path:
    """Save a tiny model in a folder."""
    from worker.engine.weights.shape_classes import shape_classes

    config = configuration(turbo=turbo, views=views)
    allowed, generator = shape_classes().allowed, torch.Generator().manual_seed(SEED)
    weights = {}
    for name in ("model", "vae", "conditioner"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            part = allowed[config[name]["target"]](**config[name]["params"])
        spread(part, generator)
        weights |= {f"{name}.{key}": value.contiguous() for key, value in part.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    save_file(weights, folder / "model.fp16.safetensors")
    return folder
