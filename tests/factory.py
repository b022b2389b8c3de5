"""Tiny pipelines of the real classes with random weights, built offline: what the engine's tests run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789,.-"
WIDTH = 32  # of every text encoder


def clip_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer that knows single letters and spells everything with them."""
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[], model_max_length=77)


def t5_tokenizer(max_length: int) -> T5TokenizerFast:
    """A T5 tokenizer over single letters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=max_length)


def _clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5(tokenizer: T5TokenizerFast, d_model: int = WIDTH) -> T5EncoderModel:
    config = T5Config(vocab_size=len(tokenizer), d_model=d_model, d_ff=37, d_kv=8, num_heads=4, num_layers=2)
    return T5EncoderModel(config)


def _vae(latent_channels: int, **more: Any) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=64,
        **more,
    )


def _unet(channels: tuple[int, int], **more: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        block_out_channels=channels,
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=8,
        **more,
    )


def _strict_checker() -> StableDiffusionSafetyChecker:
    """A safety checker that flags every picture."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    checker = StableDiffusionSafetyChecker(
        CLIPConfig(vision_config=vision | {"image_size": 30, "patch_size": 15}, projection_dim=8)
    )
    checker.concept_embeds_weights.data.fill_(-2.0)
    return checker


def stable_diffusion(channels: tuple[int, int] = (16, 32), checked: bool = False) -> StableDiffusionPipeline:
    tokenizer = clip_tokenizer()
    return StableDiffusionPipeline(
        vae=_vae(4),
        text_encoder=CLIPTextModel(_clip_config(tokenizer)),
        tokenizer=tokenizer,
        unet=_unet(channels, cross_attention_dim=WIDTH),
        scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        safety_checker=_strict_checker() if checked else None,
        feature_extractor=CLIPImageProcessorPil(size=30, crop_size=30) if checked else None,
        requires_safety_checker=checked,
    )


def stable_diffusion_xl() -> StableDiffusionXLPipeline:
    first, second = clip_tokenizer(), clip_tokenizer()
    return StableDiffusionXLPipeline(
        vae=_vae(4),
        text_encoder=CLIPTextModel(_clip_config(first)),
        text_encoder_2=CLIPTextModelWithProjection(_clip_config(second)),
        tokenizer=first,
        tokenizer_2=second,
        unet=_unet(
            (16, 32),
            cross_attention_dim=2 * WIDTH,
            transformer_layers_per_block=(1, 2),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        ),
        scheduler=EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1),
    )


def stable_diffusion_3() -> StableDiffusion3Pipeline:
    first, second, third = clip_tokenizer(), clip_tokenizer(), t5_tokenizer(64)
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=1,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=2 * WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=2 * WIDTH,
            out_channels=4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(4, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=CLIPTextModelWithProjection(_clip_config(first)),
        tokenizer=first,
        text_encoder_2=CLIPTextModelWithProjection(_clip_config(second)),
        tokenizer_2=second,
        text_encoder_3=T5EncoderModel(
            T5Config(vocab_size=len(third), d_model=2 * WIDTH, d_ff=37, d_kv=8, num_heads=4, num_layers=2)
        ),
        tokenizer_3=third,
    )


def flux(heads: int = 2, layers: int = 1) -> FluxPipeline:
    first, second = clip_tokenizer(), t5_tokenizer(64)
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=layers,
            num_single_layers=layers,
            attention_head_dim=16,
            num_attention_heads=heads,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=_vae(4, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=CLIPTextModel(_clip_config(first)),
        tokenizer=first,
        text_encoder_2=_t5(second),
        tokenizer_2=second,
    )


FAMILIES: dict[str, Callable[..., Any]] = {
    "sd": stable_diffusion,
    "sdxl": stable_diffusion_xl,
    "sd3": stable_diffusion_3,
    "flux": flux,
}


def save(family: str, folder: Path, **sizes: Any) -> Path:
    """Write a pipeline of `family` into `folder`, the same weights every time; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        pipeline = FAMILIES[family](**sizes)
        for module in pipeline.components.values():
            if isinstance(module, torch.nn.Module):
                _enliven(module)
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def _enliven(module: torch.nn.Module) -> None:
    """Give parameters that start at zero some weight: a layer that adds nothing hides faults."""
    for parameter in module.parameters():
        if parameter.numel() > 1 and not bool(parameter.any()):
            torch.nn.init.normal_(parameter.data, std=0.05)
