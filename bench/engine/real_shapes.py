"""Pipelines of the size of published models, with random weights. Speed does not depend on the weights.

Denoisers, VAEs and text encoders have their real size; tokenizers split texts into single letters. Those of Qwen's text
encoders come from the tests' tiny models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from bench.engine.shapes import Pipeline, clip_config, clip_tokenizer, scheduler, stable_diffusion, t5_tokenizer, vae_of

XXL: dict[str, Any] = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
GATED: dict[str, Any] = {"feed_forward_proj": "gated-gelu"}
T5_TOKENS = 512


def _clip_l(tokenizer: Any) -> Any:
    return clip_config(tokenizer, 768, 12, 12, 3072)


def _clip_g(tokenizer: Any) -> Any:
    return clip_config(tokenizer, 1280, 32, 20, 5120)


def _real_vae(**more: Any) -> Any:
    return vae_of((128, 256, 512, 512), 2, 32, **more)


def real_sd15() -> Pipeline:
    """Stable Diffusion 1.5."""
    tokenizer = clip_tokenizer()
    unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)  # otherwise the defaults
    return stable_diffusion(_real_vae(), CLIPTextModel(_clip_l(tokenizer)), tokenizer, unet)


def real_sdxl() -> Pipeline:
    """Stable Diffusion XL."""
    first, second = clip_tokenizer(), clip_tokenizer()
    unet = UNet2DConditionModel(
        sample_size=128,
        block_out_channels=(320, 640, 1280),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(5, 10, 20),
        transformer_layers_per_block=(1, 2, 10),
        cross_attention_dim=768 + 1280,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=6 * 256 + 1280,
    )
    return StableDiffusionXLPipeline(
        vae=_real_vae(),
        text_encoder=CLIPTextModel(_clip_l(first)),
        text_encoder_2=CLIPTextModelWithProjection(_clip_g(second)),
        tokenizer=first,
        tokenizer_2=second,
        unet=unet,
        scheduler=scheduler(EulerDiscreteScheduler, timestep_spacing="leading", steps_offset=1),
    )


def _flux_vae() -> Any:
    return _real_vae(
        latent_channels=16,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def real_flux() -> Pipeline:
    """FLUX.1 dev: 11.9 billion parameters, and a T5-XXL."""
    first, second = clip_tokenizer(), t5_tokenizer(T5_TOKENS)
    return FluxPipeline(
        transformer=FluxTransformer2DModel(guidance_embeds=True),
        scheduler=scheduler(FlowMatchEulerDiscreteScheduler, use_dynamic_shifting=True, shift=3.0, max_shift=1.15),
        vae=_flux_vae(),
        text_encoder=CLIPTextModel(_clip_l(first)),
        tokenizer=first,
        text_encoder_2=T5EncoderModel(T5Config(vocab_size=32128, **XXL, **GATED)),
        tokenizer_2=second,
    )


def real_z_image() -> Pipeline:
    """Z-Image: 6.2 billion parameters, and a Qwen3 of 4 billion."""
    from tiny import tokens

    encoder = Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    return ZImagePipeline(
        scheduler=scheduler(FlowMatchEulerDiscreteScheduler, shift=3.0),
        vae=_flux_vae(),
        text_encoder=Qwen3Model(encoder),
        tokenizer=tokens.qwen(),
        transformer=ZImageTransformer2DModel(),
    )


def real_qwen_image() -> Pipeline:
    """Qwen-Image: 20.4 billion parameters, and a Qwen2.5-VL of 8.3 billion."""
    from tiny import tokens
    from tiny.images import qwen

    text = {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584}
    with torch.device("cpu"):
        own_scheduler = qwen.scheduler()
    return QwenImagePipeline(
        scheduler=own_scheduler,
        vae=AutoencoderKLQwenImage(),
        text_encoder=Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision)),
        tokenizer=tokens.qwen(qwen.TEMPLATES),
        transformer=QwenImageTransformer2DModel(),
    )


def real_wan() -> Pipeline:
    """Wan 2.1 T2V 1.3B, and a UMT5-XXL."""
    config = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    return WanPipeline(
        tokenizer=t5_tokenizer(T5_TOKENS),
        text_encoder=UMT5EncoderModel(UMT5Config(vocab_size=256384, **XXL, **GATED)),
        transformer=WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=30),
        scheduler=scheduler(UniPCMultistepScheduler, **config),
        vae=AutoencoderKLWan(),
    )


REAL_SHAPES: dict[str, Callable[[], Pipeline]] = {
    "sd15": real_sd15,
    "sdxl": real_sdxl,
    "flux": real_flux,
    "z-image": real_z_image,
    "qwen-image": real_qwen_image,
    "wan-2.1-t2v": real_wan,
}
