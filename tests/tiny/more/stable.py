"""Tiny pipelines around the UNets of Stable Diffusion: InstructPix2Pix, latent consistency, AnimateDiff, self-attention
guidance and panoramas."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AnimateDiffPipeline,
    AnimateDiffSDXLPipeline,
    DDIMScheduler,
    EulerDiscreteScheduler,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    MotionAdapter,
    StableDiffusionImageVariationPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPanoramaPipeline,
    StableDiffusionSAGPipeline,
    StableDiffusionXLInstructPix2PixPipeline,
)
from tiny import components, tokens
from transformers import (
    CLIPImageProcessorPil,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

UNCHECKED = {"safety_checker": None, "feature_extractor": None}


def _ddim() -> DDIMScheduler:
    return DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1)


def parts(in_channels: int = 4, **unet: Any) -> dict[str, Any]:
    tokenizer = tokens.clip()
    return {
        "vae": components.vae(4),
        "text_encoder": CLIPTextModel(components.clip_config(tokenizer)),
        "tokenizer": tokenizer,
        "unet": components.unet(in_channels=in_channels, cross_attention_dim=tokens.WIDTH, **unet),
        "scheduler": _ddim(),
    }


def xl_parts(in_channels: int = 4) -> dict[str, Any]:
    first, second = tokens.clip(), tokens.clip()
    return {
        "vae": components.vae(4),
        "text_encoder": CLIPTextModel(components.clip_config(first)),
        "text_encoder_2": CLIPTextModelWithProjection(components.clip_config(second)),
        "tokenizer": first,
        "tokenizer_2": second,
        "unet": components.xl_unet(in_channels=in_channels),
        "scheduler": EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1),
    }


def pix2pix() -> StableDiffusionInstructPix2PixPipeline:
    """The denoiser gets the latents of the noise and of the image."""
    return StableDiffusionInstructPix2PixPipeline(**parts(8), **UNCHECKED, requires_safety_checker=False)


def pix2pix_xl() -> StableDiffusionXLInstructPix2PixPipeline:
    return StableDiffusionXLInstructPix2PixPipeline(**xl_parts(8))


def latent_consistency() -> LatentConsistencyModelPipeline:
    lcm = parts(time_cond_proj_dim=32) | {"scheduler": LCMScheduler()}
    return LatentConsistencyModelPipeline(**lcm, **UNCHECKED, requires_safety_checker=False)


def self_attention_guided() -> StableDiffusionSAGPipeline:
    return StableDiffusionSAGPipeline(**parts(), **UNCHECKED, requires_safety_checker=False)


def panorama() -> StableDiffusionPanoramaPipeline:
    return StableDiffusionPanoramaPipeline(**parts(), **UNCHECKED, requires_safety_checker=False)


def motion(**more: Any) -> MotionAdapter:
    return MotionAdapter(
        block_out_channels=(16, 32),
        motion_layers_per_block=1,
        motion_norm_num_groups=2,
        motion_num_attention_heads=2,
        **more,
    )


def animatediff() -> AnimateDiffPipeline:
    return AnimateDiffPipeline(**parts(), motion_adapter=motion())


def animatediff_xl() -> AnimateDiffSDXLPipeline:
    return AnimateDiffSDXLPipeline(**xl_parts(), motion_adapter=motion(use_motion_mid_block=False))


def image_variation() -> StableDiffusionImageVariationPipeline:
    """It has an image instead of a prompt."""
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    own = {name: part for name, part in parts().items() if name in ("vae", "unet", "scheduler")}
    return StableDiffusionImageVariationPipeline(
        **own,
        **UNCHECKED | {"feature_extractor": CLIPImageProcessorPil(size=32, crop_size=32)},
        image_encoder=CLIPVisionModelWithProjection(
            CLIPVisionConfig(image_size=32, patch_size=16, projection_dim=tokens.WIDTH, **vision)
        ),
        requires_safety_checker=False,
    )


PIPELINES = {
    "image-variation": image_variation,
    "pix2pix": pix2pix,
    "pix2pix-xl": pix2pix_xl,
    "lcm": latent_consistency,
    "sag": self_attention_guided,
    "panorama": panorama,
    "animatediff": animatediff,
    "animatediff-xl": animatediff_xl,
}
