"""Tiny Bria FIBO 2; its processor needs torchvision."""

from __future__ import annotations

from contextlib import AbstractContextManager

from diffusers import (
    AutoencoderKLFlux2,
    BriaFibo2Pipeline,
    BriaFibo2Transformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from tiny import components, tokens

LAYERS = (0, 1, 2)


def fibo_2() -> BriaFibo2Pipeline:
    tokenizer = tokens.qwen()
    return BriaFibo2Pipeline(
        transformer=BriaFibo2Transformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            cap_feat_dim=len(LAYERS) * tokens.WIDTH,
            injection_layer_ids=(1,),
            perceiver_num_layers=1,
            min_num_gist_tokens=4,
            max_num_gist_tokens=8,
            gist_step=2,
            gist_min_text_len=16,
            gist_max_text_len=128,
            axes_dims=(4, 6, 6),
            axes_lens=(64, 64, 64),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLFlux2(
            block_out_channels=(8, 8, 16, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=64
        ),
        text_encoder=components.qwen3_vl(tokenizer),
        processor=tokens.qwen3_vl(tokenizer),
    )


def few_layers() -> AbstractContextManager[None]:
    """Read the states of the layers of the tiny text encoder, for the gist and for one layer."""
    return components.new_ones_have(BriaFibo2Pipeline, text_encoder_out_layers=(LAYERS, LAYERS))


PIPELINES = {"fibo-2": fibo_2}
