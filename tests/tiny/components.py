"""Modules shared by several tiny families."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from diffusers import AutoencoderKL, UNet2DConditionModel
from tiny import tokens
from transformers import (
    CLIPTextConfig,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)


def clip_config(tokenizer: CLIPTokenizer, positions: int = 77) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=tokens.WIDTH,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=tokens.WIDTH,
        max_position_embeddings=positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_sizes(vocabulary: int, width: int = tokens.WIDTH) -> dict[str, Any]:
    return {"vocab_size": vocabulary, "d_model": width, "d_ff": 37, "d_kv": 8, "num_heads": 4, "num_layers": 2}


def t5_encoder(tokenizer: T5Tokenizer, width: int = tokens.WIDTH) -> T5EncoderModel:
    return T5EncoderModel(T5Config(**t5_sizes(len(tokenizer), width)))


def gemma_2(vocabulary: int) -> Gemma2Model:
    return Gemma2Model(
        Gemma2Config(
            vocab_size=vocabulary,
            hidden_size=tokens.WIDTH,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        )
    )


def qwen_vl(vocabulary: int, layers: int = 2) -> Qwen2_5_VLForConditionalGeneration:
    """The text encoder of several families; they use it without images."""
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": vocabulary,
                "hidden_size": tokens.WIDTH,
                "intermediate_size": 37,
                "num_hidden_layers": layers,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "out_hidden_size": tokens.WIDTH,
            },
        )
    )


def qwen3_vl(tokenizer: Qwen2Tokenizer, layers: int = 2) -> Qwen3VLForConditionalGeneration:
    """A text encoder that also reads images."""
    token: Callable[[str], Any] = tokenizer.convert_tokens_to_ids
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": tokens.WIDTH,
                "intermediate_size": 37,
                "num_hidden_layers": layers,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e6,
                    "mrope_section": [2, 3, 3],
                    "mrope_interleaved": True,
                },
            },
            vision_config={
                "depth": 2,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_heads": 2,
                "patch_size": 16,
                "out_hidden_size": tokens.WIDTH,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            image_token_id=token("<|image_pad|>"),
            video_token_id=token("<|video_pad|>"),
            vision_start_token_id=token("<|vision_start|>"),
            vision_end_token_id=token("<|vision_end|>"),
        )
    )


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


def xl_unet(in_channels: int = 4, text_encoders: int = 2, size_numbers: int = 6) -> UNet2DConditionModel:
    """The UNet of XL. `size_numbers` are those of a micro-condition: its refiner's has one less."""
    return unet(
        in_channels=in_channels,
        cross_attention_dim=text_encoders * tokens.WIDTH,
        transformer_layers_per_block=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=size_numbers * 8 + tokens.WIDTH,
    )


@contextmanager
def new_ones_have(pipeline_class: Any, **attributes: Any) -> Iterator[None]:
    """Give each new pipeline of a class `attributes`: for those that hold a list of large sizes, and take no other."""
    original = pipeline_class.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        vars(self).update(attributes)

    with mock.patch.object(pipeline_class, "__init__", init):
        yield
