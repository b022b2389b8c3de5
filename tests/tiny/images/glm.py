"""Tiny GLM-Image: an autoregressive model generates the coarse image, the denoiser the fine one."""

from __future__ import annotations

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, GlmImagePipeline, GlmImageTransformer2DModel
from tiny import tokens
from transformers import (
    ByT5Tokenizer,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageImageProcessorPil,
    GlmImageProcessor,
    T5Config,
    T5EncoderModel,
)


def _painter(vocabulary: int) -> GlmImageForConditionalGeneration:
    """The autoregressive model; it cannot generate the end token, so always generates all tokens."""
    attention = {"num_attention_heads": 2, "intermediate_size": 24}
    return GlmImageForConditionalGeneration(
        GlmImageConfig(
            text_config={
                "vocab_size": vocabulary,
                "hidden_size": tokens.WIDTH,
                "num_hidden_layers": 1,
                "num_key_value_heads": 1,
                "vision_vocab_size": tokens.CODES,
                "pad_token_id": tokens.CODES + 2,
                "eos_token_id": tokens.CODES + 1,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [2, 3, 3],
                    "partial_rotary_factor": 1.0,
                },
                **attention,
            },
            vision_config={"depth": 1, "hidden_size": 16, "num_heads": 2, "image_size": 64, "intermediate_size": 24},
            vq_config={"embed_dim": 16, "num_embeddings": tokens.CODES, "latent_channels": 16},
            image_token_id=tokens.CODES + 5,
            image_start_token_id=tokens.CODES,
            image_end_token_id=tokens.CODES + 1,
        )
    )


def glm_image() -> GlmImagePipeline:
    tokenizer, glyphs = tokens.glm(), ByT5Tokenizer()
    return GlmImagePipeline(
        tokenizer=glyphs,
        processor=GlmImageProcessor(
            GlmImageImageProcessorPil(
                patch_size=16,
                merge_size=1,
                temporal_patch_size=1,
                size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64},
            ),
            tokenizer,
            chat_template=tokens.GLM_CHAT,
        ),
        text_encoder=T5EncoderModel(
            T5Config(vocab_size=len(glyphs), d_model=tokens.WIDTH, d_ff=37, d_kv=8, num_heads=4, num_layers=2)
        ),
        vision_language_encoder=_painter(len(tokenizer)),
        vae=AutoencoderKL(
            block_out_channels=(8, 8, 16, 16),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            latents_mean=[0.1, -0.1, 0.2, 0.0],
            latents_std=[0.5, 0.6, 0.4, 0.7],
        ),
        transformer=GlmImageTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=tokens.WIDTH,
            time_embed_dim=32,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=tokens.CODES,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear"),
    )


PIPELINES = {"glm-image": glm_image}
