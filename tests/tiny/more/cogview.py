"""Tiny CogVideoX (2B: positions are added; image-to-video and 5B: rotary), CogView 3 Plus and CogView 4."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    CogView3PlusPipeline,
    CogView3PlusTransformer2DModel,
    CogView4ControlPipeline,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from tiny import components, tokens
from transformers import GlmConfig, GlmModel

FRAMES = 9


def _video_parts(in_channels: int, **transformer: Any) -> dict[str, Any]:
    tokenizer = tokens.t5(226)
    return {
        "tokenizer": tokenizer,
        "text_encoder": components.t5_encoder(tokenizer),
        "vae": AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2
        ),
        "transformer": CogVideoXTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=in_channels,
            out_channels=4,
            time_embed_dim=16,
            text_embed_dim=tokens.WIDTH,
            num_layers=2,
            sample_width=8,
            sample_height=8,
            sample_frames=FRAMES,
            **transformer,
        ),
    }


def cogvideox() -> CogVideoXPipeline:
    return CogVideoXPipeline(**_video_parts(4), scheduler=CogVideoXDDIMScheduler(prediction_type="v_prediction"))


def cogvideox_5b() -> CogVideoXPipeline:
    return CogVideoXPipeline(
        **_video_parts(4, use_rotary_positional_embeddings=True),
        scheduler=CogVideoXDPMScheduler(prediction_type="v_prediction"),
    )


def cogvideox_image() -> CogVideoXImageToVideoPipeline:
    return CogVideoXImageToVideoPipeline(
        **_video_parts(8, use_rotary_positional_embeddings=True, use_learned_positional_embeddings=True),
        scheduler=CogVideoXDDIMScheduler(prediction_type="v_prediction"),
    )


def cogview_3() -> CogView3PlusPipeline:
    tokenizer = tokens.t5(224)
    return CogView3PlusPipeline(
        tokenizer=tokenizer,
        text_encoder=components.t5_encoder(tokenizer),
        vae=components.vae(4),
        transformer=CogView3PlusTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            text_embed_dim=tokens.WIDTH,
            time_embed_dim=16,
            condition_dim=4,
            pos_embed_max_size=16,
            sample_size=8,
        ),
        scheduler=CogVideoXDDIMScheduler(prediction_type="v_prediction"),
    )


def _cogview_4_parts(in_channels: int) -> dict[str, Any]:
    tokenizer = tokens.llama("")
    return {
        "tokenizer": tokenizer,
        "text_encoder": GlmModel(
            GlmConfig(
                vocab_size=len(tokenizer),
                hidden_size=tokens.WIDTH,
                intermediate_size=37,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        ),
        "vae": components.vae(4),
        "transformer": CogView4Transformer2DModel(
            in_channels=in_channels,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=tokens.WIDTH,
            time_embed_dim=16,
            condition_dim=4,
            rope_axes_dim=(8, 8),
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear"),
    }


def cogview_4() -> CogView4Pipeline:
    return CogView4Pipeline(**_cogview_4_parts(4))


def cogview_4_control() -> CogView4ControlPipeline:
    """The denoiser gets noise and the image of structure."""
    return CogView4ControlPipeline(**_cogview_4_parts(8))


PIPELINES = {
    "cogvideox": cogvideox,
    "cogvideox-5b": cogvideox_5b,
    "cogvideox-i2v": cogvideox_image,
    "cogview-3": cogview_3,
    "cogview-4": cogview_4,
    "cogview-4-control": cogview_4_control,
}
