"""Tiny pipelines of families without stacking rules: PixArt-Sigma, AuraFlow, Lumina 2 and Chroma."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    ChromaPipeline,
    ChromaTransformer2DModel,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)
from diffusers.pipelines.pixart_alpha import pipeline_pixart_sigma
from tiny import components, tokens
from transformers import Gemma2Config, Gemma2Model, UMT5Config, UMT5EncoderModel


def pixart_sigma() -> PixArtSigmaPipeline:
    tokenizer = tokens.t5(300)
    return PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=components.t5_encoder(tokenizer),
        vae=components.vae(),
        transformer=PixArtTransformer2DModel(
            sample_size=64,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=32,
            caption_channels=tokens.WIDTH,
            use_additional_conditions=False,
        ),
        scheduler=DPMSolverMultistepScheduler(),
    )


def aura_flow() -> AuraFlowPipeline:
    tokenizer = tokens.t5(256)
    return AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(UMT5Config(**components.t5_sizes(len(tokenizer)))),
        vae=components.vae(),
        transformer=AuraFlowTransformer2DModel(
            sample_size=8,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=tokens.WIDTH,
            caption_projection_dim=32,
            pos_embed_max_size=64,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
    )


def lumina_2() -> Lumina2Pipeline:
    tokenizer = tokens.gemma()
    return Lumina2Pipeline(
        transformer=Lumina2Transformer2DModel(
            sample_size=8,
            in_channels=4,
            hidden_size=32,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=8,
            axes_dim_rope=(4, 6, 6),
            axes_lens=(300, 64, 64),
            cap_feat_dim=tokens.WIDTH,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=components.vae(shift_factor=0.06, scaling_factor=0.5),
        text_encoder=Gemma2Model(
            Gemma2Config(
                vocab_size=len(tokenizer),
                hidden_size=tokens.WIDTH,
                intermediate_size=37,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
            )
        ),
        tokenizer=tokenizer,
    )


def chroma() -> ChromaPipeline:
    tokenizer = tokens.t5(64)
    return ChromaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=components.vae(shift_factor=0.06, scaling_factor=0.5),
        text_encoder=components.t5_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=ChromaTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=tokens.WIDTH,
            axes_dims_rope=(4, 4, 8),
            approximator_num_channels=32,
            approximator_hidden_dim=32,
            approximator_layers=1,
        ),
    )


@contextmanager
def small_images() -> Iterator[None]:
    """Replace the list of sizes from which PixArt-Sigma chooses, about half a megapixel each, by a small one."""
    whole = pipeline_pixart_sigma.ASPECT_RATIO_512_BIN
    pipeline_pixart_sigma.ASPECT_RATIO_512_BIN = {"1.0": [64.0, 64.0]}
    try:
        yield
    finally:
        pipeline_pixart_sigma.ASPECT_RATIO_512_BIN = whole


PIPELINES = {"pixart-sigma": pixart_sigma, "aura-flow": aura_flow, "lumina-2": lumina_2, "chroma": chroma}
