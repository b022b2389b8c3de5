"""Tiny Anima, which ships as a modular pipeline only."""

from __future__ import annotations

from diffusers import (
    AnimaModularPipeline,
    AnimaTextConditioner,
    AutoencoderKLQwenImage,
    CosmosTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
)
from tiny import tokens
from transformers import Qwen3Config, Qwen3Model

CHANNELS = 4


def anima() -> AnimaModularPipeline:
    tokenizer, t5_tokenizer = tokens.qwen(), tokens.t5(512)
    pipeline = AnimaModularPipeline()
    pipeline.update_components(
        tokenizer=tokenizer,
        t5_tokenizer=t5_tokenizer,
        text_encoder=Qwen3Model(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=tokens.WIDTH,
                intermediate_size=37,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
            )
        ),
        text_conditioner=AnimaTextConditioner(
            source_dim=tokens.WIDTH,
            target_dim=tokens.WIDTH,
            model_dim=tokens.WIDTH,
            num_layers=2,
            num_attention_heads=2,
            target_vocab_size=len(t5_tokenizer),
        ),
        transformer=CosmosTransformer3DModel(
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            mlp_ratio=2.0,
            text_embed_dim=tokens.WIDTH,
            adaln_lora_dim=4,
            max_size=(4, 32, 32),
            extra_pos_embed_type=None,
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=CHANNELS,
            dim_mult=[1, 1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1] * CHANNELS,
            latents_std=[0.5] * CHANNELS,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    return pipeline


PIPELINES = {"anima": anima}
