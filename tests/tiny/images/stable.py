"""Tiny Stable Diffusion 1.x, XL and 3, and FLUX.1."""

from __future__ import annotations

from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from tiny import components, tokens
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPTextModel,
    CLIPTextModelWithProjection,
)


def _strict_checker() -> StableDiffusionSafetyChecker:
    """A safety checker that flags every image."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    checker = StableDiffusionSafetyChecker(
        CLIPConfig(vision_config=vision | {"image_size": 30, "patch_size": 15}, projection_dim=8)
    )
    checker.concept_embeds_weights.data.fill_(-2.0)
    return checker


def stable_diffusion(channels: tuple[int, int] = (16, 32), checked: bool = False) -> StableDiffusionPipeline:
    tokenizer = tokens.clip()
    return StableDiffusionPipeline(
        vae=components.vae(4),
        text_encoder=CLIPTextModel(components.clip_config(tokenizer)),
        tokenizer=tokenizer,
        unet=components.unet(channels, cross_attention_dim=tokens.WIDTH),
        scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        safety_checker=_strict_checker() if checked else None,
        feature_extractor=CLIPImageProcessorPil(size=30, crop_size=30) if checked else None,
        requires_safety_checker=checked,
    )


def stable_diffusion_xl() -> StableDiffusionXLPipeline:
    first, second = tokens.clip(), tokens.clip()
    return StableDiffusionXLPipeline(
        vae=components.vae(4),
        text_encoder=CLIPTextModel(components.clip_config(first)),
        text_encoder_2=CLIPTextModelWithProjection(components.clip_config(second)),
        tokenizer=first,
        tokenizer_2=second,
        unet=components.xl_unet(),
        scheduler=EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1),
    )


def stable_diffusion_xl_refiner() -> StableDiffusionXLImg2ImgPipeline:
    """As the published one: without the first text encoder, and conditioned by aesthetic scores."""
    tokenizer = tokens.clip()
    return StableDiffusionXLImg2ImgPipeline(
        vae=components.vae(4),
        text_encoder=None,
        text_encoder_2=CLIPTextModelWithProjection(components.clip_config(tokenizer)),
        tokenizer=None,
        tokenizer_2=tokenizer,
        unet=components.xl_unet(text_encoders=1, size_numbers=5),
        scheduler=EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1),
        requires_aesthetics_score=True,
    )


def stable_diffusion_3() -> StableDiffusion3Pipeline:
    first, second, third = tokens.clip(), tokens.clip(), tokens.t5(64)
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=8,
            patch_size=1,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=2 * tokens.WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=2 * tokens.WIDTH,
            out_channels=4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=components.vae(4, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=CLIPTextModelWithProjection(components.clip_config(first)),
        tokenizer=first,
        text_encoder_2=CLIPTextModelWithProjection(components.clip_config(second)),
        tokenizer_2=second,
        text_encoder_3=components.t5_encoder(third, 2 * tokens.WIDTH),
        tokenizer_3=third,
    )


def flux(heads: int = 2, layers: int = 1, guidance_embeds: bool = True) -> FluxPipeline:
    first, second = tokens.clip(), tokens.t5(64)
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=layers,
            num_single_layers=layers,
            attention_head_dim=16,
            num_attention_heads=heads,
            joint_attention_dim=tokens.WIDTH,
            pooled_projection_dim=tokens.WIDTH,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=guidance_embeds,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=components.vae(4, shift_factor=0.06, scaling_factor=1.5),
        text_encoder=CLIPTextModel(components.clip_config(first)),
        tokenizer=first,
        text_encoder_2=components.t5_encoder(second),
        tokenizer_2=second,
    )


def flux_schnell() -> FluxPipeline:
    return flux(guidance_embeds=False)


PIPELINES = {
    "sd": stable_diffusion,
    "sdxl": stable_diffusion_xl,
    "sdxl-refiner": stable_diffusion_xl_refiner,
    "sd3": stable_diffusion_3,
    "flux": flux,
    "flux-schnell": flux_schnell,
}
