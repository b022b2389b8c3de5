"""Tiny SANA pipelines: SANA 1.5, SANA (queries and keys are not normalised, positions are embedded) and Sprint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diffusers import (
    AutoencoderDC,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaSprintImg2ImgPipeline,
    SanaSprintPipeline,
    SanaTransformer2DModel,
    SCMScheduler,
)
from diffusers.pipelines.sana import (
    pipeline_sana,
    pipeline_sana_controlnet,
    pipeline_sana_sprint,
    pipeline_sana_sprint_img2img,
)
from tiny import tokens
from transformers import Gemma2Config, Gemma2Model


def _parts() -> dict[str, Any]:
    tokenizer = tokens.gemma()
    layers: dict[str, Any] = {
        "block_types": ("ResBlock", "ResBlock", "EfficientViTBlock"),
        "block_out_channels": (8, 16, 16),
        "layers_per_block": (1, 1, 1),
        "qkv_multiscales": ((), (), (5,)),
    }
    return {
        "tokenizer": tokenizer,
        "text_encoder": Gemma2Model(
            Gemma2Config(
                vocab_size=len(tokenizer),
                hidden_size=tokens.WIDTH,
                intermediate_size=37,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
            )
        ),
        "vae": AutoencoderDC(
            latent_channels=4,
            attention_head_dim=4,
            scaling_factor=0.41407,
            **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in layers.items()},
        ),
    }


def _transformer(**more: Any) -> SanaTransformer2DModel:
    return SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=tokens.WIDTH,
        sample_size=32,
        **more,
    )


def sana() -> SanaPipeline:
    scheduler = DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    return SanaPipeline(**_parts(), transformer=_transformer(interpolation_scale=1.0), scheduler=scheduler)


def sana_1_5() -> SanaPipeline:
    transformer = _transformer(qk_norm="rms_norm_across_heads")
    return SanaPipeline(**_parts(), transformer=transformer, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))


def _sprint_parts() -> dict[str, Any]:
    transformer = _transformer(qk_norm="rms_norm_across_heads", guidance_embeds=True)
    return _parts() | {
        "transformer": transformer,
        "scheduler": SCMScheduler(prediction_type="trigflow", sigma_data=0.5),
    }


def sana_sprint() -> SanaSprintPipeline:
    return SanaSprintPipeline(**_sprint_parts())


def sana_sprint_image() -> SanaSprintImg2ImgPipeline:
    return SanaSprintImg2ImgPipeline(**_sprint_parts())


@contextmanager
def small_images() -> Iterator[None]:
    """Replace the list of megapixel sizes from which the pipelines choose by small ones."""
    modules = (pipeline_sana, pipeline_sana_sprint, pipeline_sana_sprint_img2img, pipeline_sana_controlnet)
    whole = [module.ASPECT_RATIO_1024_BIN for module in modules]
    for module in modules:
        module.ASPECT_RATIO_1024_BIN = {"0.5": [64.0, 128.0], "1.0": [64.0, 64.0], "2.0": [128.0, 64.0]}
    try:
        yield
    finally:
        for module, sizes in zip(modules, whole, strict=True):
            module.ASPECT_RATIO_1024_BIN = sizes


PIPELINES = {"sana": sana, "sana-1.5": sana_1_5, "sana-sprint": sana_sprint, "sana-sprint-i2i": sana_sprint_image}
