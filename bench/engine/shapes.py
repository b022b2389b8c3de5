"""Small pipelines with random weights for the benchmarks on a CPU.

Speed does not depend on the weights. Tokenizers split texts into single letters.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.utils import logging as diffusers_logging
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)
from transformers.utils import logging as transformers_logging

Pipeline = Any  # diffusers' pipelines carry no types
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.-"
SMALL_WIDTH = 32  # of the small shapes' text encoders


def clip_tokenizer() -> Any:
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def t5_tokenizer(max_length: int = 64) -> Any:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=max_length)


def clip_config(tokenizer: Any, width: int, layers: int, heads: int, inner: int) -> Any:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        projection_dim=width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _small_clip(tokenizer: Any) -> Any:
    return clip_config(tokenizer, SMALL_WIDTH, 2, 4, 37)


def vae_of(channels: tuple[int, ...], layers: int, groups: int, latent_channels: int = 4, **more: Any) -> Any:
    return AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        layers_per_block=layers,
        latent_channels=latent_channels,
        norm_num_groups=groups,
        **more,
    )


def _small_vae(**more: Any) -> Any:
    return vae_of((8, 8, 16, 16), 1, 4, **more)


def scheduler(kind: Any, **config: Any) -> Any:
    with torch.device("cpu"):  # schedulers compute on the CPU, wherever the weights are
        return kind(**config)


def small_sd() -> Pipeline:
    """Small Stable Diffusion 1.x: about 60 ms per forward of 8 images with guidance at 64² on one CPU thread."""
    tokenizer = clip_tokenizer()
    unet = UNet2DConditionModel(
        block_out_channels=(64, 128),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=8,
        cross_attention_dim=SMALL_WIDTH,
    )
    return stable_diffusion(_small_vae(), CLIPTextModel(_small_clip(tokenizer)), tokenizer, unet)


def stable_diffusion(vae: Any, encoder: Any, tokenizer: Any, unet: Any) -> Pipeline:
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler(DDIMScheduler, clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def small_flux() -> Pipeline:
    """Small FLUX.1."""
    first, second = clip_tokenizer(), t5_tokenizer()
    t5 = T5Config(vocab_size=len(second), d_model=SMALL_WIDTH, d_ff=37, d_kv=8, num_heads=4, num_layers=2)
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            joint_attention_dim=SMALL_WIDTH,
            pooled_projection_dim=SMALL_WIDTH,
            guidance_embeds=True,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=4,
            axes_dims_rope=(4, 4, 8),
        ),
        scheduler=scheduler(FlowMatchEulerDiscreteScheduler),
        vae=_small_vae(shift_factor=0.06, scaling_factor=1.5),
        text_encoder=CLIPTextModel(_small_clip(first)),
        tokenizer=first,
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=second,
    )


SHAPES: dict[str, Callable[[], Pipeline]] = {
    "sd": small_sd,
    "flux": small_flux,
}


def disable_progress_bars() -> None:
    """Keep the libraries' progress bars and warnings out of the output."""
    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


def save(shape: str, folder: Path) -> None:
    """Save a small pipeline to `folder`."""
    save_pipeline(SHAPES[shape], folder, "cpu", torch.float32)


def save_pipeline(build: Callable[[], Pipeline], folder: Path, device: str, dtype: torch.dtype) -> None:
    """Save the pipeline that `build` returns to `folder`; its weights are drawn on `device`."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(7)
        pipeline = build()
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            component.to(device, dtype)
    pipeline.save_pretrained(folder, safe_serialization=True)
