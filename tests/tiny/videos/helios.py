"""Tiny Helios: base, and the pyramid pipelines of mid and distilled. They return at least one chunk of 33 frames."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLWan,
    HeliosDMDScheduler,
    HeliosPipeline,
    HeliosPyramidPipeline,
    HeliosScheduler,
    HeliosTransformer3DModel,
)
from tiny import tokens
from transformers import UMT5Config, UMT5EncoderModel

GAMMA = 0.33  # at the real third the pyramid's block noise has no Cholesky factor in float32 on a CPU


def _parts(**transformer: Any) -> dict[str, Any]:
    tokenizer = tokens.t5(512)
    return {
        "tokenizer": tokenizer,
        "text_encoder": UMT5EncoderModel(
            UMT5Config(vocab_size=len(tokenizer), d_model=tokens.WIDTH, d_ff=37, d_kv=8, num_heads=4, num_layers=2)
        ),
        "vae": AutoencoderKLWan(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.1, 0.2, 0.0],
            latents_std=[0.5, 0.6, 0.4, 0.7],
        ),
        "transformer": HeliosTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=tokens.WIDTH,
            freq_dim=32,
            ffn_dim=48,
            num_layers=2,
            rope_dim=(4, 4, 4),
            **transformer,
        ),
    }


def helios() -> HeliosPipeline:
    return HeliosPipeline(
        **_parts(), scheduler=HeliosScheduler(stages=1, stage_range=[0, 1], use_dynamic_shifting=True)
    )


def helios_mid() -> HeliosPyramidPipeline:
    return HeliosPyramidPipeline(**_parts(), scheduler=HeliosScheduler(gamma=GAMMA), is_cfg_zero_star=True)


def helios_distilled() -> HeliosPyramidPipeline:
    scheduler = HeliosDMDScheduler(gamma=GAMMA, use_dynamic_shifting=True)
    return HeliosPyramidPipeline(**_parts(is_amplify_history=True), scheduler=scheduler, is_distilled=True)


PIPELINES = {"helios": helios, "helios-mid": helios_mid, "helios-distilled": helios_distilled}
