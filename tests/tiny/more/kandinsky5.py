"""Tiny Kandinsky 5: text-to-image, text-to-video and image-to-video."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky5I2VPipeline,
    Kandinsky5T2IPipeline,
    Kandinsky5T2VPipeline,
    Kandinsky5Transformer3DModel,
)
from tiny import components, tokens
from transformers import CLIPTextModel

# The pipelines cut as many tokens off their templates as the words have in the real vocabulary.
TEMPLATES = (
    "system user You are a prompt engineer. Describe the image by detailing the color, shape, size, texture, quantity, "
    "text, spatial relationships of the objects and background: You are a prompt engineer. Describe the video in "
    "detail. Describe how the camera moves or shakes, describe the zoom and view angle, whether it follows the "
    "objects. Describe the location of the video, main characters or objects and their action. Describe the dynamism "
    "of the video and presented actions. Name the visual style of the video: whether it is a professional footage, "
    "user generated content, some kind of animation, video game or scren content. Describe the visual effects, "
    "postprocessing and transitions if they are presented in the video. Pay attention to the order of key actions "
    "shown in the scene."
)


def _parts(channels: int, visual_cond: bool = False) -> dict[str, Any]:
    first, second = tokens.qwen(TEMPLATES), tokens.clip()
    return {
        "text_encoder": components.qwen_vl(len(first)),
        "tokenizer": first,
        "text_encoder_2": CLIPTextModel(components.clip_config(second)),
        "tokenizer_2": second,
        "transformer": Kandinsky5Transformer3DModel(
            in_visual_dim=channels,
            out_visual_dim=channels,
            in_text_dim=tokens.WIDTH,
            in_text_dim2=tokens.WIDTH,
            time_dim=32,
            model_dim=32,
            ff_dim=48,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(4, 6, 6),
            visual_cond=visual_cond,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
    }


def kandinsky_5_image() -> Kandinsky5T2IPipeline:
    return Kandinsky5T2IPipeline(vae=components.flow_vae(16), **_parts(16))


def small_images() -> AbstractContextManager[None]:
    """Replace the list of megapixel sizes of text-to-image by a small one."""
    return components.new_ones_have(Kandinsky5T2IPipeline, resolutions=[(64, 64)])


def _video_vae() -> AutoencoderKLHunyuanVideo:
    return AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 16), layers_per_block=1, norm_num_groups=4
    )


def kandinsky_5_video() -> Kandinsky5T2VPipeline:
    return Kandinsky5T2VPipeline(vae=_video_vae(), **_parts(4))


def kandinsky_5_from_image() -> Kandinsky5I2VPipeline:
    return Kandinsky5I2VPipeline(vae=_video_vae(), **_parts(4, visual_cond=True))


PIPELINES = {
    "kandinsky-5-t2i": kandinsky_5_image,
    "kandinsky-5-t2v": kandinsky_5_video,
    "kandinsky-5-i2v": kandinsky_5_from_image,
}
