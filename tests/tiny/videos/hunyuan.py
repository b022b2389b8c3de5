"""Tiny HunyuanVideo and HunyuanVideo 1.5, text-to-video and image-to-video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanSkyreelsImageToVideoPipeline,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from tiny import tokens
from transformers import (
    ByT5Tokenizer,
    CLIPImageProcessorPil,
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLTextModel,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

# The pipelines cut as many tokens off their templates as the words have in the real vocabulary.
TEMPLATES = (
    "system user assistant Describe the video by detailing the following aspects according to the reference image: "
    "1. The main content and theme of the video. 2. The color, shape, size, texture, quantity, text, and spatial "
    "relationships of the objects. 3. Actions, events, behaviors temporal relationships, physical movement changes of "
    "the objects. 4. background environment, light, style and atmosphere. 5. camera angles, movements, and transitions "
    "used in the video: You are a helpful"
)
SIZES: dict[str, Any] = {"intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 2}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def parts(transformer: dict[str, Any]) -> dict[str, Any]:
    second = tokens.clip()
    return {
        "transformer": HunyuanVideoTransformer3DModel(
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=tokens.WIDTH,
            pooled_projection_dim=16,
            rope_axes_dim=(4, 6, 6),
            **transformer,
        ),
        "vae": AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 16), layers_per_block=1, norm_num_groups=4
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
        "text_encoder_2": CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(second),
                hidden_size=16,
                bos_token_id=second.bos_token_id,
                eos_token_id=second.eos_token_id,
                pad_token_id=second.pad_token_id,
                **SIZES,
            )
        ),
        "tokenizer_2": second,
    }


def hunyuan_video() -> HunyuanVideoPipeline:
    tokenizer = tokens.llama(TEMPLATES)
    return HunyuanVideoPipeline(
        text_encoder=LlamaModel(LlamaConfig(vocab_size=len(tokenizer), hidden_size=tokens.WIDTH, **SIZES)),
        tokenizer=tokenizer,
        **parts({"in_channels": 4, "guidance_embeds": True}),
    )


def hunyuan_video_image() -> HunyuanVideoImageToVideoPipeline:
    """The image replaces the first frame, and 576 tokens of the prompt."""
    tokenizer = tokens.llama(TEMPLATES)
    vision = {**VISION, "image_size": 48, "patch_size": 2}
    token: Callable[[str], Any] = tokenizer.convert_tokens_to_ids
    config = LlavaConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": tokens.WIDTH,
            "max_position_embeddings": 2048,
            **SIZES,
        },
        vision_config={"model_type": "clip_vision_model", **vision},
        image_token_index=token("<image>"),
        image_seq_length=576,
    )
    config.pad_token_id = tokenizer.pad_token_id  # the pipeline reads it here
    return HunyuanVideoImageToVideoPipeline(
        text_encoder=LlavaForConditionalGeneration(config),
        tokenizer=tokenizer,
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 48}, crop_size={"height": 48, "width": 48}),
        **parts({"in_channels": 4, "guidance_embeds": True, "image_condition_type": "token_replace"}),
    )


def hunyuan_skyreels_image() -> HunyuanSkyreelsImageToVideoPipeline:
    """The latents of the image are further channels."""
    tokenizer = tokens.llama(TEMPLATES)
    return HunyuanSkyreelsImageToVideoPipeline(
        text_encoder=LlamaModel(LlamaConfig(vocab_size=len(tokenizer), hidden_size=tokens.WIDTH, **SIZES)),
        tokenizer=tokenizer,
        **parts({"in_channels": 8, "guidance_embeds": True}),
    )


def _parts_1_5(task: str) -> dict[str, Any]:
    tokenizer, second = tokens.qwen(TEMPLATES), ByT5Tokenizer()
    return {
        "text_encoder": Qwen2_5_VLTextModel(
            Qwen2_5_VLTextConfig(
                vocab_size=len(tokenizer),
                hidden_size=tokens.WIDTH,
                num_key_value_heads=1,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
                **SIZES,
            )
        ),
        "tokenizer": tokenizer,
        "transformer": HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_refiner_layers=1,
            text_embed_dim=tokens.WIDTH,
            text_embed_2_dim=16,
            image_embed_dim=16,
            rope_axes_dim=(4, 6, 6),
            target_size=64,
            task_type=task,
        ),
        "vae": AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 16, 16),
            layers_per_block=1,
            spatial_compression_ratio=16,
            temporal_compression_ratio=4,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=5.0),
        "text_encoder_2": T5EncoderModel(
            T5Config(vocab_size=len(second), d_model=16, d_ff=37, d_kv=8, num_heads=2, num_layers=1)
        ),
        "tokenizer_2": second,
        "guider": ClassifierFreeGuidance(guidance_scale=6.0),
    }


def hunyuan_video_1_5() -> HunyuanVideo15Pipeline:
    return HunyuanVideo15Pipeline(**_parts_1_5("t2v"))


def hunyuan_video_1_5_image() -> HunyuanVideo15ImageToVideoPipeline:
    """The pipeline expects the image encoder's 729 tokens."""
    return HunyuanVideo15ImageToVideoPipeline(
        image_encoder=SiglipVisionModel(SiglipVisionConfig(image_size=54, patch_size=2, **VISION)),
        feature_extractor=SiglipImageProcessorPil(size={"height": 54, "width": 54}),
        **_parts_1_5("i2v"),
    )


PIPELINES = {
    "hunyuan-skyreels-i2v": hunyuan_skyreels_image,
    "hunyuan-video": hunyuan_video,
    "hunyuan-video-i2v": hunyuan_video_image,
    "hunyuan-video-1.5": hunyuan_video_1_5,
    "hunyuan-video-1.5-i2v": hunyuan_video_1_5_image,
}
