"""Tiny pipelines of diffusion transformers with one text encoder: PixArt-Alpha, Lumina-Next, Latte, Bria, Bria
FIBO, Ovis-Image, PRX and OmniGen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from diffusers import (
    AutoencoderKLWan,
    BriaFiboPipeline,
    BriaFiboTransformer2DModel,
    BriaPipeline,
    BriaTransformer2DModel,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    LattePipeline,
    LatteTransformer3DModel,
    LuminaNextDiT2DModel,
    LuminaPipeline,
    OmniGenPipeline,
    OmniGenTransformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtTransformer2DModel,
)
from diffusers.pipelines.pixart_alpha import pipeline_pixart_alpha
from tiny import components, tokens
from transformers import (
    GemmaConfig,
    GemmaModel,
    Qwen3Config,
    Qwen3Model,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

LANGUAGE_MODEL: dict[str, Any] = {
    "hidden_size": tokens.WIDTH,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def _t5(max_length: int) -> dict[str, Any]:
    tokenizer = tokens.t5(max_length)
    return {"tokenizer": tokenizer, "text_encoder": components.t5_encoder(tokenizer)}


def pixart_alpha() -> PixArtAlphaPipeline:
    return PixArtAlphaPipeline(
        **_t5(120),
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


@contextmanager
def small_images() -> Iterator[None]:
    """Replace the list of sizes from which PixArt-Alpha chooses by a small one."""
    with mock.patch.object(pipeline_pixart_alpha, "ASPECT_RATIO_512_BIN", {"1.0": [64.0, 64.0]}):
        yield


def lumina_next() -> LuminaPipeline:
    tokenizer = tokens.llama("")
    return LuminaPipeline(
        transformer=LuminaNextDiT2DModel(
            sample_size=8,
            in_channels=4,
            hidden_size=32,
            num_layers=2,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=16,
            cross_attention_dim=tokens.WIDTH,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=components.vae(),
        text_encoder=GemmaModel(GemmaConfig(vocab_size=len(tokenizer), **LANGUAGE_MODEL)),
        tokenizer=tokenizer,
    )


def latte() -> LattePipeline:
    return LattePipeline(
        **_t5(120),
        vae=components.vae(),
        transformer=LatteTransformer3DModel(
            sample_size=8,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=tokens.WIDTH,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            video_length=5,
        ),
        scheduler=DDIMScheduler(clip_sample=False),
    )


def bria() -> BriaPipeline:
    return BriaPipeline(
        **_t5(128),
        transformer=BriaTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=tokens.WIDTH,
            axes_dims_rope=[0, 4, 4],
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=components.vae(4, shift_factor=0.06, scaling_factor=0.5),
    )


def bria_fibo() -> BriaFiboPipeline:
    """The pipeline replaces an empty prompt by token 128000."""
    tokenizer = tokens.llama("")
    return BriaFiboPipeline(
        transformer=BriaFiboTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=2 * tokens.WIDTH,
            axes_dims_rope=[0, 4, 4],
            text_encoder_dim=tokens.WIDTH,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLWan(
            base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        text_encoder=SmolLM3ForCausalLM(SmolLM3Config(vocab_size=128_001, pad_token_id=None, **LANGUAGE_MODEL)),
        tokenizer=tokenizer,
    )


def ovis_image() -> OvisImagePipeline:
    tokenizer = tokens.qwen()
    return OvisImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=components.flow_vae(4),
        text_encoder=Qwen3Model(Qwen3Config(vocab_size=len(tokenizer), **LANGUAGE_MODEL)),
        tokenizer=tokenizer,
        transformer=OvisImageTransformer2DModel(
            in_channels=16,
            out_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=tokens.WIDTH,
            axes_dims_rope=(4, 4, 8),
        ),
    )


def omnigen() -> OmniGenPipeline:
    tokenizer = tokens.llama("user assistant")
    return OmniGenPipeline(
        transformer=OmniGenTransformer2DModel(
            hidden_size=tokens.WIDTH,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=48,
            num_layers=1,
            in_channels=4,
            time_step_dim=8,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            rope_scaling={"long_factor": list(range(1, 9)), "short_factor": list(range(1, 9))},
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(invert_sigmas=True, num_train_timesteps=1),
        vae=components.vae(),
        tokenizer=tokenizer,
    )


PIPELINES = {
    "pixart-alpha": pixart_alpha,
    "lumina-next": lumina_next,
    "latte": latte,
    "bria": bria,
    "bria-fibo": bria_fibo,
    "ovis-image": ovis_image,
    "omnigen": omnigen,
}
