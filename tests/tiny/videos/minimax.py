"""Tiny MiniMax-H3, video with sound; its processor needs torchvision."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3ModularPipeline,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from tiny import tokens
from tiny.components import qwen3_vl
from transformers import Qwen2Tokenizer

LAYERS = 51  # the pipeline reads the states after the 50th
VIDEO, AUDIO = 4, 4


def minimax_h3() -> Any:
    tokenizer: Qwen2Tokenizer = tokens.qwen()
    pipeline = MiniMaxH3ModularPipeline()
    audio_vae = AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        encoder_rates=(2, 4),
        latent_dim=16,
        latent_channels=AUDIO,
        num_attention_heads=2,
        decoder_dim=16,
        decoder_rates=(4, 2),
        decoder_kernel_sizes=(8, 4),
        latents_mean=[0.1] * AUDIO,
        latents_std=[0.5] * AUDIO,
    )
    vars(audio_vae)["tiny_gain"] = 0.8  # most samples would be clipped otherwise
    pipeline.update_components(
        text_encoder=qwen3_vl(tokenizer, LAYERS),
        tokenizer=tokenizer,
        processor=tokens.qwen3_vl(tokenizer),
        vae=AutoencoderKLMiniMaxH3(
            latent_channels=VIDEO,
            block_out_channels=(8, 8, 8, 8, 8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            decoder_num_layers=1,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=16,
            latents_mean=(0.1,) * VIDEO,
            latents_std=(0.5,) * VIDEO,
        ),
        audio_vae=audio_vae,
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
        transformer=MiniMaxH3Transformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            hidden_size=32,
            num_layers=2,
            num_refiner_layers=1,
            ffn_dim=48,
            in_channels=VIDEO,
            audio_in_channels=AUDIO,
            text_dim=tokens.WIDTH,
            freq_dim=32,
            time_embed_hidden_dim=32,
            time_embed_dim=16,
            rope_freq_dim=2,
        ),
    )
    return pipeline


PIPELINES = {"modular-minimax-h3": minimax_h3}
