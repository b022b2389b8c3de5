"""Tiny ERNIE-Image, without the model that rewrites prompts."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLFlux2,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from tiny import tokens
from transformers import Mistral3Config, Mistral3Model


def ernie_image() -> ErnieImagePipeline:
    tokenizer = tokens.mistral()
    sizes = {"intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
    return ErnieImagePipeline(
        transformer=ErnieImageTransformer2DModel(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=2,
            ffn_hidden_size=48,
            in_channels=16,
            out_channels=16,
            text_in_dim=tokens.WIDTH,
            rope_axes_dim=(4, 6, 6),
        ),
        vae=AutoencoderKLFlux2(
            block_out_channels=(8, 8, 16, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, sample_size=64
        ),
        text_encoder=Mistral3Model(
            Mistral3Config(
                text_config={
                    "model_type": "mistral",
                    "vocab_size": len(tokenizer),
                    "hidden_size": tokens.WIDTH,
                    "num_key_value_heads": 1,
                    **sizes,
                },
                vision_config={"model_type": "pixtral", "hidden_size": 32, "image_size": 32, "patch_size": 8, **sizes},
            )
        ),
        tokenizer=tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


PIPELINES = {"ernie-image": ernie_image}
