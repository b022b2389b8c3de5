"""Tiny Qwen-Image pipelines: text (its image-to-image and inpaint share the modules), edit, edit-plus and layered.

The edit pipelines' processor needs torchvision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageLayeredPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.modular_pipelines.qwenimage import encoders as modular_encoders
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
    pipeline_qwenimage_layered,
)
from tiny import tokens
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

# The pipelines cut as many tokens off their templates as the words have in the real vocabulary.
TEMPLATES = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background: Describe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate. "
    "system user assistant"
)


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, shift_terminal=0.02
    )


def vae(input_channels: int = 3) -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=6,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        input_channels=input_channels,
        latents_mean=[0.1, -0.1, 0.2, 0.0, 0.1, -0.2],
        latents_std=[0.4, 0.5, 0.3, 0.5, 0.4, 0.4],
    )


def text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    token: Callable[[str], Any] = tokenizer.convert_tokens_to_ids
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": tokens.WIDTH,
                "intermediate_size": 37,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
                "bos_token_id": token("<|im_start|>"),
                "eos_token_id": token("<|im_end|>"),
            },
            vision_config={
                "depth": 2,
                "hidden_size": tokens.WIDTH,
                "intermediate_size": 37,
                "num_heads": 4,
                "out_hidden_size": tokens.WIDTH,
                "fullatt_block_indexes": [1],
                "window_size": 56,
            },
            image_token_id=token("<|image_pad|>"),
            video_token_id=token("<|video_pad|>"),
            vision_start_token_id=token("<|vision_start|>"),
            vision_end_token_id=token("<|vision_end|>"),
        )
    )


def transformer(**more: Any) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=24,
        out_channels=6,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=tokens.WIDTH,
        axes_dims_rope=(4, 6, 6),
        **more,
    )


def qwen_image() -> QwenImagePipeline:
    tokenizer = tokens.qwen(TEMPLATES)
    return QwenImagePipeline(
        scheduler=scheduler(),
        vae=vae(),
        text_encoder=text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer(),
    )


def _edit(make: type[Any], input_channels: int = 3, **more: Any) -> Any:
    tokenizer = tokens.qwen(TEMPLATES)
    return make(
        scheduler=scheduler(),
        vae=vae(input_channels),
        text_encoder=text_encoder(tokenizer),
        tokenizer=tokenizer,
        processor=tokens.qwen_vl(tokenizer),
        transformer=transformer(**more),
    )


def qwen_image_edit() -> QwenImageEditPipeline:
    return _edit(QwenImageEditPipeline)


def qwen_image_edit_plus() -> QwenImageEditPlusPipeline:
    """Like 2511: the tokens of reference images are modulated by a timestep of zero."""
    return _edit(QwenImageEditPlusPipeline, zero_cond_t=True)


def qwen_image_layered() -> QwenImageLayeredPipeline:
    return _edit(QwenImageLayeredPipeline, input_channels=4, use_additional_t_cond=True, use_layer3d_rope=True)


@contextmanager
def small_images() -> Iterator[None]:
    """Reduce the 1024x1024 or 640x640 pixels to which the edit pipelines scale inputs, to a 256th."""
    modules = (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus, pipeline_qwenimage_layered, modular_encoders)
    whole = [module.calculate_dimensions for module in modules]
    for module, calculate in zip(modules, whole, strict=True):
        module.calculate_dimensions = lambda area, ratio, calculate=calculate: calculate(max(area // 256, 1024), ratio)
    try:
        yield
    finally:
        for module, calculate in zip(modules, whole, strict=True):
            module.calculate_dimensions = calculate


PIPELINES = {
    "qwen-image": qwen_image,
    "qwen-image-edit": qwen_image_edit,
    "qwen-image-edit-plus": qwen_image_edit_plus,
    "qwen-image-layered": qwen_image_layered,
}
