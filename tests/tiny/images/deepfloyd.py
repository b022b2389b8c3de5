"""Tiny pipelines that denoise pixels, without a VAE: the first stage of DeepFloyd IF, and PRX-Pixel; and PRX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from diffusers import (
    DDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
    IFPipeline,
    PRXPipeline,
    PRXPixelPipeline,
    PRXTransformer2DModel,
    UNet2DConditionModel,
)
from diffusers.pipelines.deepfloyd_if import IFSafetyChecker, IFWatermarker
from diffusers.pipelines.prx import pipeline_prx, pipeline_prx_pixel
from tiny import components, tokens
from transformers import CLIPConfig, CLIPImageProcessorPil, Qwen3Config, Qwen3Model


def _strict_checker() -> IFSafetyChecker:
    """A safety checker that flags every image."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    checker = IFSafetyChecker(
        CLIPConfig(vision_config=vision | {"image_size": 30, "patch_size": 15, "projection_dim": 8}, projection_dim=8)
    )
    torch.nn.init.constant_(checker.p_head.bias, 9.0)
    return checker


def unet(in_channels: int = 3, halvings: int = 1, **fields: Any) -> UNet2DConditionModel:
    unet = UNet2DConditionModel(
        sample_size=64,
        in_channels=in_channels,
        out_channels=6,
        layers_per_block=1,
        block_out_channels=(*(16,) * halvings, 32),
        norm_num_groups=8,
        down_block_types=(*("ResnetDownsampleBlock2D",) * halvings, "SimpleCrossAttnDownBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        up_block_types=("SimpleCrossAttnUpBlock2D", *("ResnetUpsampleBlock2D",) * halvings),
        cross_attention_dim=tokens.WIDTH,
        encoder_hid_dim=tokens.WIDTH,
        attention_head_dim=8,
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
        cross_attention_norm="group_norm",
        resnet_time_scale_shift="scale_shift",
        act_fn="gelu",
        **fields,
    )
    unet.tiny_gain = 0.4  # steps in pixels amplify: at 1.0 a change of 1e-6 of the text became 0.07 of the image
    return unet


def scheduler() -> DDPMScheduler:
    return DDPMScheduler(
        beta_schedule="squaredcos_cap_v2",
        thresholding=True,
        dynamic_thresholding_ratio=0.95,
        sample_max_value=1.0,
        # What random weights predict as a variance has no bounds, and as noise is divided by almost nothing.
        variance_type="fixed_small",
        prediction_type="v_prediction",
    )


def deepfloyd_if(checked: bool = False, marked: bool = False) -> IFPipeline:
    tokenizer = tokens.t5(77)
    watermarker = IFWatermarker()
    watermarker.watermark_image.fill_(200.0)
    return IFPipeline(
        tokenizer=tokenizer,
        text_encoder=components.t5_encoder(tokenizer),
        unet=unet(),
        scheduler=scheduler(),
        safety_checker=_strict_checker() if checked else None,
        feature_extractor=CLIPImageProcessorPil(size=30, crop_size=30) if checked else None,
        watermarker=watermarker if marked else None,
        requires_safety_checker=checked,
    )


def prx_pixel() -> PRXPixelPipeline:
    tokenizer = tokens.qwen()
    return PRXPixelPipeline(
        transformer=PRXTransformer2DModel(
            patch_size=8,
            in_channels=3,
            context_in_dim=tokens.WIDTH,
            hidden_size=16,
            mlp_ratio=2.0,
            num_heads=2,
            depth=1,
            axes_dim=[4, 4],
            bottleneck_size=8,
            resolution_embeds=True,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=Qwen3Model(
            Qwen3Config(
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
        prompt_max_tokens=16,
    )


def prx() -> PRXPipeline:
    tokenizer = tokens.gemma()
    tokenizer.model_max_length = 64
    return PRXPipeline(
        transformer=PRXTransformer2DModel(
            patch_size=2,
            in_channels=4,
            context_in_dim=tokens.WIDTH,
            hidden_size=16,
            mlp_ratio=2.0,
            num_heads=2,
            depth=1,
            axes_dim=[4, 4],
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=components.gemma_2(len(tokenizer)),
        tokenizer=tokenizer,
        vae=components.flow_vae(),
    )


@contextmanager
def small_latents() -> Iterator[None]:
    """Replace the list of sizes from which PRX chooses by a small one."""
    with mock.patch.object(pipeline_prx, "ASPECT_RATIO_BINS", {pipeline_prx.DEFAULT_RESOLUTION: {"1.0": [64, 64]}}):
        yield


@contextmanager
def small_images() -> Iterator[None]:
    """Replace the list of sizes from which PRX-Pixel chooses, about a megapixel each, by a small one."""
    bins = pipeline_prx_pixel.ASPECT_RATIO_BINS
    pipeline_prx_pixel.ASPECT_RATIO_BINS = {1024: {"1.0": [80, 80]}}
    try:
        yield
    finally:
        pipeline_prx_pixel.ASPECT_RATIO_BINS = bins


PIPELINES = {"deepfloyd-if": deepfloyd_if, "prx-pixel": prx_pixel, "prx": prx}
