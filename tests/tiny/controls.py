"""Tiny control nets and IP-Adapters with random weights for the denoisers of tiny pipelines."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    ControlNetModel,
    ControlNetUnionModel,
    DiffusionPipeline,
    FluxControlNetModel,
    FluxPriorReduxPipeline,
    HunyuanDiT2DControlNetModel,
    QwenImageControlNetModel,
    SanaControlNetModel,
    SD3ControlNetModel,
    T2IAdapter,
    ZImageControlNetModel,
)
from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder
from safetensors.torch import save_file
from tiny import tokens
from tiny.weights import spread
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
)

_VISION = {"image_size": 30, "patch_size": 15, "projection_dim": 24}


def save(source: Path, folder: Path, seed: int) -> Path:
    """Save a control net for the pipeline in `source`."""
    index = json.loads((source / "model_index.json").read_text())
    component = "unet" if "unet" in index else "transformer"
    denoiser = getattr(diffusers, index[component][1]).from_pretrained(source / component)
    with torch.random.fork_rng(devices=[]):
        net = _build(denoiser)
    spread(net, torch.Generator().manual_seed(seed))
    net.save_pretrained(folder, safe_serialization=True)
    return folder


def save_t2i_adapter(source: Path, folder: Path, seed: int, *, in_channels: int) -> Path:
    """Save a T2I-Adapter for the UNet of the pipeline in `source`; its first block has no attention, as that of XL."""
    channels = json.loads((source / "unet" / "config.json").read_text())["block_out_channels"]
    adapter = T2IAdapter(in_channels, [*channels, *channels[-1:] * 2], 1, 16, adapter_type="full_adapter_xl")
    spread(adapter, torch.Generator().manual_seed(seed))
    adapter.save_pretrained(folder, safe_serialization=True)
    return folder


def save_union(source: Path, folder: Path, seed: int) -> Path:
    """Save a union of control nets, with modes 0 to 3, for the pipeline of XL or FLUX.1 in `source`."""
    index = json.loads((source / "model_index.json").read_text())
    component = "unet" if "unet" in index else "transformer"
    denoiser = getattr(diffusers, index[component][1]).from_pretrained(source / component)
    if component == "unet":
        width = denoiser.config.block_out_channels[0]
        sizes = {"num_control_type": 4, "num_trans_channel": width, "num_trans_head": 2, "num_proj_channel": width}
        net: Any = _like(denoiser, ControlNetUnionModel, conditioning_embedding_out_channels=(4, 8, 8, 8), **sizes)
    else:
        net = _like(denoiser, FluxControlNetModel, num_layers=1, num_single_layers=1, num_mode=4)
    spread(net, torch.Generator().manual_seed(seed))
    net.save_pretrained(folder, safe_serialization=True)
    return folder


def save_redux(folder: Path, seed: int, *, width: int = tokens.WIDTH) -> Path:
    """Save the encoders of images of FLUX.1 Redux for tiny pipelines."""
    generator = torch.Generator().manual_seed(seed)
    config = SiglipVisionConfig(
        image_size=32, patch_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    prior = FluxPriorReduxPipeline(
        image_encoder=SiglipVisionModel(config),
        feature_extractor=SiglipImageProcessorPil(size={"height": 32, "width": 32}),
        image_embedder=ReduxImageEncoder(redux_dim=16, txt_in_features=width),
    )
    spread(prior.image_encoder, generator)
    spread(prior.image_embedder, generator)
    prior.save_pretrained(folder, safe_serialization=True)
    return folder


def _build(denoiser: Any) -> Any:
    sizes = {name: denoiser.config.get(name) for name in ("attention_head_dim", "num_attention_heads")}
    match type(denoiser).__name__:
        case "UNet2DConditionModel":
            return ControlNetModel.from_unet(denoiser, conditioning_embedding_out_channels=(4, 8, 8, 8))
        case "SD3Transformer2DModel":
            return SD3ControlNetModel.from_transformer(denoiser, num_layers=1, num_extra_conditioning_channels=0)
        case "FluxTransformer2DModel":
            return FluxControlNetModel.from_transformer(denoiser, num_layers=1, num_single_layers=1, **sizes)
        case "QwenImageTransformer2DModel":
            return QwenImageControlNetModel.from_transformer(denoiser, num_layers=1, **sizes)
        case "SanaTransformer2DModel":
            return _like(denoiser, SanaControlNetModel, num_layers=1)
        case "ZImageTransformer2DModel":
            places = {"control_layers_places": [0, 1], "control_refiner_layers_places": [0]}
            return _like(
                denoiser,
                ZImageControlNetModel,
                **places,
                control_in_dim=2 * denoiser.config.in_channels + 1,  # of version 2, which also repaints
                add_control_noise_refiner="control_noise_refiner",
            )
        case "HunyuanDiT2DModel":
            return _like(denoiser, HunyuanDiT2DControlNetModel, transformer_num_layers=denoiser.config.num_layers)
    raise ValueError(f"no control net for {type(denoiser).__name__}")


def _like(denoiser: Any, net_class: Any, **more: Any) -> Any:
    """Return a net of the sizes of a denoiser."""
    parameters = inspect.signature(net_class.__init__).parameters
    return net_class(**{name: value for name, value in denoiser.config.items() if name in parameters} | more)


def save_ip_adapter(source: Path, folder: Path, seed: int) -> Path:
    """Save an IP-Adapter for the UNet of the pipeline in `source`, with its image encoder."""
    loader: Any = DiffusionPipeline
    unet = loader.from_pretrained(source, local_files_only=True).unet
    generator = torch.Generator().manual_seed(seed)
    encoder = CLIPVisionModelWithProjection(
        CLIPVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **_VISION)
    )
    spread(encoder, generator)
    encoder.save_pretrained(folder / "image_encoder", safe_serialization=True)
    width = unet.config.cross_attention_dim
    state = {
        "image_proj.proj.weight": torch.randn(4 * width, _VISION["projection_dim"], generator=generator),
        "image_proj.proj.bias": torch.zeros(4 * width),
        "image_proj.norm.weight": torch.ones(width),
        "image_proj.norm.bias": torch.zeros(width),
    }
    for at, (name, layer) in enumerate(
        (name, unet.get_submodule(name.removesuffix(".processor"))) for name in unet.attn_processors
    ):
        if name.endswith("attn2.processor"):
            for part in ("to_k_ip", "to_v_ip"):
                weights = torch.randn(layer.to_k.weight.shape, generator=generator) * width**-0.5
                state[f"ip_adapter.{at}.{part}.weight"] = weights
    save_file(state, folder / "ip-adapter.safetensors")
    return folder
