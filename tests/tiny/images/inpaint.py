"""Tiny inpaint checkpoints of Stable Diffusion 1.x and XL (nine channels), and Stable Diffusion 3 for inpainting."""

from __future__ import annotations

from typing import Any

from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
)
from tiny import components, tokens
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
)


def stable_diffusion_inpaint() -> StableDiffusionInpaintPipeline:
    tokenizer = tokens.clip()
    return StableDiffusionInpaintPipeline(
        vae=components.vae(4),
        text_encoder=CLIPTextModel(components.clip_config(tokenizer)),
        tokenizer=tokenizer,
        unet=components.unet(in_channels=9, cross_attention_dim=tokens.WIDTH),
        scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl_inpaint() -> StableDiffusionXLInpaintPipeline:
    first, second = tokens.clip(), tokens.clip()
    return StableDiffusionXLInpaintPipeline(
        vae=components.vae(4),
        text_encoder=CLIPTextModel(components.clip_config(first)),
        text_encoder_2=CLIPTextModelWithProjection(components.clip_config(second)),
        tokenizer=first,
        tokenizer_2=second,
        unet=components.xl_unet(in_channels=9),
        scheduler=EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1),
    )


def stable_diffusion_3(**more: Any) -> StableDiffusion3Pipeline:
    """Its inpaint pipeline, built of the same modules, requires 16 (or 33) channels."""
    first, second, third = tokens.clip(), tokens.clip(), tokens.t5(64)
    joint = 2 * tokens.WIDTH
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=joint,
            caption_projection_dim=32,
            pooled_projection_dim=joint,
            out_channels=16,
            **more,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=components.vae(16, shift_factor=0.06, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=CLIPTextModelWithProjection(components.clip_config(first)),
        tokenizer=first,
        text_encoder_2=CLIPTextModelWithProjection(components.clip_config(second)),
        tokenizer_2=second,
        text_encoder_3=components.t5_encoder(third, joint),
        tokenizer_3=third,
    )


def stable_diffusion_3_5_medium() -> StableDiffusion3Pipeline:
    """Queries and keys are normalised, and the first block has a second self-attention of the image tokens."""
    return stable_diffusion_3(qk_norm="rms_norm", dual_attention_layers=(0,))


def stable_diffusion_3_5_large() -> StableDiffusion3Pipeline:
    return stable_diffusion_3(qk_norm="rms_norm")


PIPELINES = {
    "sd-inpaint": stable_diffusion_inpaint,
    "sdxl-inpaint": stable_diffusion_xl_inpaint,
    "sd3-16": stable_diffusion_3,
    "sd3.5-medium": stable_diffusion_3_5_medium,
    "sd3.5-large": stable_diffusion_3_5_large,
}
