"""Tiny Ideogram 4: a denoiser with text and one without, and states of several layers of the text encoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Ideogram4Pipeline,
    Ideogram4Transformer2DModel,
)
from diffusers.pipelines.ideogram4 import pipeline_ideogram4
from tiny import components, tokens

LAYERS = (0, 1)


def _transformer() -> Ideogram4Transformer2DModel:
    return Ideogram4Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=48,
        adaln_dim=16,
        llm_features_dim=len(LAYERS) * tokens.WIDTH,
        mrope_section=(4, 2, 2),
    )


def ideogram_4() -> Ideogram4Pipeline:
    tokenizer = tokens.qwen()
    return Ideogram4Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=AutoencoderKLFlux2(
            block_out_channels=(8, 8, 16, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=64
        ),
        text_encoder=components.qwen3_vl(tokenizer, layers=len(LAYERS)).model,
        tokenizer=tokenizer,
        transformer=_transformer(),
        unconditional_transformer=_transformer(),
    )


@contextmanager
def few_layers() -> Iterator[None]:
    """Read the states of the layers of the tiny text encoder."""
    with mock.patch.object(pipeline_ideogram4, "QWEN3_VL_ACTIVATION_LAYERS", LAYERS):
        yield


PIPELINES = {"ideogram-4": ideogram_4}
