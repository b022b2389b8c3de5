"""Tiny FLUX.2 pipelines. The processor of dev needs torchvision; Klein needs none."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from tiny import tokens
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM

NARROW = 16  # the text encoders are deep: the pipelines read their layers 10, 20, 30 or 9, 18, 27


def _vae() -> AutoencoderKLFlux2:
    return AutoencoderKLFlux2(
        block_out_channels=(8, 8, 16, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=64
    )


def _transformer(guidance_embeds: bool) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * NARROW,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)


def _sizes(vocabulary: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": NARROW,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }


def flux_2_dev() -> Flux2Pipeline:
    processor = tokens.pixtral()
    vision = {"hidden_size": NARROW, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Flux2Pipeline(
        scheduler=_scheduler(),
        vae=_vae(),
        text_encoder=Mistral3ForConditionalGeneration(
            Mistral3Config(
                text_config={"model_type": "mistral", **_sizes(len(processor.tokenizer), 31)},
                vision_config={"model_type": "pixtral", "image_size": 32, "patch_size": 8, "head_dim": 8, **vision},
                image_token_index=processor.tokenizer.convert_tokens_to_ids("[IMG]"),
            )
        ),
        tokenizer=processor,
        transformer=_transformer(guidance_embeds=True),
    )


def _klein(is_distilled: bool) -> Flux2KleinPipeline:
    tokenizer = tokens.qwen()
    return Flux2KleinPipeline(
        scheduler=_scheduler(),
        vae=_vae(),
        text_encoder=Qwen3ForCausalLM(Qwen3Config(**_sizes(len(tokenizer), 28))),
        tokenizer=tokenizer,
        transformer=_transformer(guidance_embeds=False),
        is_distilled=is_distilled,
    )


def flux_2_klein() -> Flux2KleinPipeline:
    return _klein(is_distilled=True)


def flux_2_klein_base() -> Flux2KleinPipeline:
    return _klein(is_distilled=False)


PIPELINES = {"flux-2-dev": flux_2_dev, "flux-2-klein": flux_2_klein, "flux-2-klein-base": flux_2_klein_base}
