"""Modules shared by several tiny families."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL, UNet2DConditionModel
from tiny import tokens
from transformers import CLIPTextConfig, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer


def clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=tokens.WIDTH,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=tokens.WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_sizes(vocabulary: int, width: int = tokens.WIDTH) -> dict[str, Any]:
    return {"vocab_size": vocabulary, "d_model": width, "d_ff": 37, "d_kv": 8, "num_heads": 4, "num_layers": 2}


def t5_encoder(tokenizer: T5Tokenizer, width: int = tokens.WIDTH) -> T5EncoderModel:
    return T5EncoderModel(T5Config(**t5_sizes(len(tokenizer), width)))


def vae(latent_channels: int = 4, **more: Any) -> AutoencoderKL:
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


def flow_vae(latent_channels: int = 4) -> AutoencoderKL:
    """A VAE like FLUX.1's and Z-Image's: shifted, and without the two 1x1 convolutions."""
    return vae(
        latent_channels, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False
    )


def unet(channels: tuple[int, int] = (16, 32), in_channels: int = 4, **more: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        block_out_channels=channels,
        layers_per_block=1,
        sample_size=8,
        in_channels=in_channels,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=8,
        **more,
    )


def xl_unet(in_channels: int = 4) -> UNet2DConditionModel:
    return unet(
        in_channels=in_channels,
        cross_attention_dim=2 * tokens.WIDTH,
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + tokens.WIDTH,
    )
