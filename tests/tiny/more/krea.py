"""Tiny Krea 2: its denoiser gets the states of several layers of the text encoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    Krea2Pipeline,
    Krea2Transformer2DModel,
)
from diffusers.modular_pipelines.krea2 import encoders
from tiny import tokens
from transformers import Qwen3VLConfig, Qwen3VLModel

# The pipeline cuts as many tokens off its template as the words have in the real vocabulary.
TEMPLATE = (
    "system user assistant Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:"
)
LAYERS = 3


def krea_2() -> Krea2Pipeline:
    tokenizer = tokens.qwen(TEMPLATE)
    return Krea2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1] * 4,
            latents_std=[0.5] * 4,
        ),
        text_encoder=Qwen3VLModel(
            Qwen3VLConfig(
                text_config={
                    "vocab_size": len(tokenizer),
                    "hidden_size": tokens.WIDTH,
                    "intermediate_size": 37,
                    "num_hidden_layers": LAYERS - 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 1,
                    "head_dim": 16,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 1e6,
                        "mrope_section": [2, 3, 3],
                        "mrope_interleaved": True,
                    },
                },
                vision_config={
                    "depth": 1,
                    "hidden_size": 16,
                    "intermediate_size": 24,
                    "num_heads": 2,
                    "patch_size": 16,
                    "out_hidden_size": tokens.WIDTH,
                    "num_position_embeddings": 16,
                    "deepstack_visual_indexes": [0],
                },
            )
        ),
        tokenizer=tokenizer,
        transformer=Krea2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=48,
            timestep_embed_dim=16,
            text_hidden_dim=tokens.WIDTH,
            num_text_layers=LAYERS,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=48,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 6, 6),
        ),
        text_encoder_select_layers=tuple(range(LAYERS)),
    )


@contextmanager
def few_layers() -> Iterator[None]:
    """Let the modular pipelines read the layers of the tiny text encoder, which they do not read from its folder."""
    with mock.patch.object(encoders, "KREA2_TEXT_ENCODER_SELECT_LAYERS", tuple(range(LAYERS))):
        yield


PIPELINES = {"krea-2": krea_2}
