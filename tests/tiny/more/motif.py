"""Tiny Motif-Video; its guidance is an object of the pipeline."""

from __future__ import annotations

from typing import Any

from diffusers import (
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    MotifVideoImage2VideoPipeline,
    MotifVideoPipeline,
    MotifVideoTransformer3DModel,
)
from tiny import tokens
from tiny.more import wan
from transformers import (
    PreTrainedTokenizerBase,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    T5Gemma2Encoder,
)
from transformers.models.t5gemma2 import T5Gemma2EncoderConfig

_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIDE = 16


def _text_encoder(tokenizer: PreTrainedTokenizerBase) -> T5Gemma2Encoder:
    """It has images of its own, which the image-to-video pipeline reads."""
    return T5Gemma2Encoder(
        T5Gemma2EncoderConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": tokens.WIDTH,
                "intermediate_size": 37,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "pad_token_id": tokenizer.pad_token_id,
                "dropout_rate": 0.0,
            },
            vision_config=SiglipVisionConfig(image_size=_SIDE, patch_size=8, **_VISION),
            mm_tokens_per_image=4,
            boi_token_index=tokenizer.bos_token_id,
            eoi_token_index=tokenizer.eos_token_id,
            image_token_index=tokenizer.mask_token_id,
        ),
        eoi_token_index=tokenizer.eos_token_id,
    )


def _parts(**transformer: Any) -> dict[str, Any]:
    tokenizer = tokens.gemma()
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        "vae": wan.vae(),
        "tokenizer": tokenizer,
        "text_encoder": _text_encoder(tokenizer),
        "guider": ClassifierFreeGuidance(guidance_scale=4.0),
        "transformer": MotifVideoTransformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_single_layers=1,
            text_embed_dim=tokens.WIDTH,
            rope_axes_dim=(4, 6, 6),
            enable_text_cross_attention_dual=True,
            **transformer,
        ),
    }


def motif_video() -> MotifVideoPipeline:
    return MotifVideoPipeline(**_parts())


def motif_image() -> MotifVideoImage2VideoPipeline:
    return MotifVideoImage2VideoPipeline(
        **_parts(image_embed_dim=_VISION["hidden_size"]),
        feature_extractor=SiglipImageProcessorPil(size={"height": _SIDE, "width": _SIDE}),
    )


PIPELINES = {"motif-video": motif_video, "motif-video-i2v": motif_image}
