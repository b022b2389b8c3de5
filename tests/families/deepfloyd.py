"""DeepFloyd IF's second stage: it makes an image four times as large, in pixels."""

from __future__ import annotations

from diffusers import DDPMScheduler, IFSuperResolutionPipeline
from parity.more.families import image
from tiny import components, tokens
from tiny.images import deepfloyd

from shared.tasks import Task


def super_resolution() -> IFSuperResolutionPipeline:
    """The denoiser gets the pixels of the result so far and the enlarged image, and how noisy that was made."""
    tokenizer = tokens.t5(77)
    return IFSuperResolutionPipeline(
        tokenizer=tokenizer,
        text_encoder=components.t5_encoder(tokenizer),
        unet=deepfloyd.unet(in_channels=6, halvings=3, class_embed_type="timestep"),
        scheduler=deepfloyd.scheduler(),
        image_noising_scheduler=DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
        safety_checker=None,
        feature_extractor=None,
        watermarker=None,
        requires_safety_checker=False,
    )


PIPELINES = {"deepfloyd-upscaler": super_resolution}
CALLS = {"IFSuperResolutionPipeline": "image negative_prompt guidance_scale height width"}
ROWS = (image("DeepFloyd IF x4", "IFSuperResolutionPipeline", "deepfloyd-upscaler", task=Task.UPSCALE),)
