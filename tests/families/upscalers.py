"""Stable Diffusion's upscalers: of images, and of latents."""

from __future__ import annotations

from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionLatentUpscalePipeline,
    StableDiffusionUpscalePipeline,
    UNet2DConditionModel,
)
from parity.more.families import image
from tiny import components, tokens
from transformers import CLIPTextModel

from shared.tasks import Task


def upscaler() -> StableDiffusionUpscalePipeline:
    """The denoiser gets the latents and the image, which has a quarter of the result's sides, as the latents have."""
    tokenizer = tokens.clip()
    return StableDiffusionUpscalePipeline(
        vae=AutoencoderKL(
            block_out_channels=(8, 8, 16),
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            layers_per_block=1,
            norm_num_groups=4,
            scaling_factor=0.08333,
        ),
        text_encoder=CLIPTextModel(components.clip_config(tokenizer)),
        tokenizer=tokenizer,
        unet=components.unet(in_channels=7, cross_attention_dim=tokens.WIDTH, num_class_embeds=1000),
        low_res_scheduler=DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
        scheduler=DDIMScheduler(prediction_type="v_prediction", clip_sample=False, set_alpha_to_one=False),
        max_noise_level=350,
    )


def latent_upscaler() -> StableDiffusionLatentUpscalePipeline:
    """The denoiser gets the logarithm of the noise as its time, and makes one channel that is not used."""
    tokenizer = tokens.clip()
    return StableDiffusionLatentUpscalePipeline(
        vae=components.vae(4),
        text_encoder=CLIPTextModel(components.clip_config(tokenizer)),
        tokenizer=tokenizer,
        unet=UNet2DConditionModel(
            act_fn="gelu",
            attention_head_dim=8,
            norm_num_groups=None,
            block_out_channels=(32, 32, 64, 64),
            time_cond_proj_dim=2 * 64 + tokens.WIDTH,
            conv_in_kernel=1,
            conv_out_kernel=1,
            cross_attention_dim=tokens.WIDTH,
            down_block_types=("KDownBlock2D", *("KCrossAttnDownBlock2D",) * 3),
            in_channels=8,
            mid_block_type=None,
            only_cross_attention=False,
            out_channels=5,
            resnet_time_scale_shift="scale_shift",
            time_embedding_type="fourier",
            timestep_post_act="gelu",
            up_block_types=(*("KCrossAttnUpBlock2D",) * 3, "KUpBlock2D"),
        ),
        scheduler=EulerDiscreteScheduler(prediction_type="sample"),
    )


PIPELINES = {"upscaler": upscaler, "latent-upscaler": latent_upscaler}
CALLS = {
    "StableDiffusionUpscalePipeline": "image negative_prompt guidance_scale",
    "StableDiffusionLatentUpscalePipeline": "image negative_prompt guidance_scale",
}
ROWS = (
    image("Stable Diffusion x4 upscaler", "StableDiffusionUpscalePipeline", "upscaler", task=Task.UPSCALE),
    image("Latent x2 upscaler", "StableDiffusionLatentUpscalePipeline", "latent-upscaler", task=Task.UPSCALE),
)
