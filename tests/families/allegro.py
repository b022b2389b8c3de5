"""Allegro."""

from __future__ import annotations

from contextlib import AbstractContextManager

from diffusers import (
    AllegroPipeline,
    AllegroTransformer3DModel,
    AutoencoderKLAllegro,
    EulerAncestralDiscreteScheduler,
)
from parity.more.families import Clip, video
from tiny import components, tokens

SIDE, FRAMES = 64, 24  # of the one tile that the tiny VAE decodes


def allegro() -> AllegroPipeline:
    tokenizer = tokens.t5(512)
    return AllegroPipeline(
        tokenizer=tokenizer,
        text_encoder=components.t5_encoder(tokenizer),
        scheduler=EulerAncestralDiscreteScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="linear", prediction_type="v_prediction"
        ),
        vae=AutoencoderKLAllegro(
            block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=2, sample_size=SIDE
        ),
        transformer=AllegroTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=24,
            num_layers=2,
            cross_attention_dim=48,
            caption_channels=tokens.WIDTH,
            sample_height=SIDE // 8,
            sample_width=SIDE // 8,
            sample_frames=FRAMES // 4,
        ),
    )


def tiled() -> AbstractContextManager[None]:
    """The VAE decodes nothing without it: models need `vae_tiling`."""
    return components.new_ones_have(AutoencoderKLAllegro, use_tiling=True)


PIPELINES = {"allegro": allegro}
CALLS = {"AllegroPipeline": "negative_prompt guidance_scale num_frames height width"}
ROWS = (video("Allegro", "AllegroPipeline", "allegro", Clip(FRAMES, FRAMES - 1, SIDE), around="tiled"),)
