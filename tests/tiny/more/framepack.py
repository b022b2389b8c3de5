"""Tiny FramePack: HunyuanVideo that makes a video in sections, from the last to the first."""

from __future__ import annotations

from diffusers import HunyuanVideoFramepackPipeline, HunyuanVideoFramepackTransformer3DModel
from tiny import tokens
from tiny.videos import hunyuan
from transformers import LlamaConfig, LlamaModel, SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

_SIDE = 16


def framepack() -> HunyuanVideoFramepackPipeline:
    tokenizer = tokens.llama(hunyuan.TEMPLATES)
    parts = hunyuan.parts({"in_channels": 4})
    parts["transformer"] = HunyuanVideoFramepackTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=tokens.WIDTH,
        pooled_projection_dim=16,
        rope_axes_dim=(4, 6, 6),
        has_image_proj=True,
        image_proj_dim=16,
        has_clean_x_embedder=True,
    )
    return HunyuanVideoFramepackPipeline(
        text_encoder=LlamaModel(LlamaConfig(vocab_size=len(tokenizer), hidden_size=tokens.WIDTH, **hunyuan.SIZES)),
        tokenizer=tokenizer,
        image_encoder=SiglipVisionModel(SiglipVisionConfig(image_size=_SIDE, patch_size=8, **hunyuan.VISION)),
        feature_extractor=SiglipImageProcessorPil(size={"height": _SIDE, "width": _SIDE}),
        **parts,
    )


PIPELINES = {"framepack": framepack}
