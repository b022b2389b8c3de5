"""Tiny LongCat-AudioDiT, speech and sounds."""

from __future__ import annotations

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LongCatAudioDiTPipeline,
    LongCatAudioDiTTransformer,
    LongCatAudioDiTVae,
)
from tiny import components, tokens
from transformers import UMT5Config, UMT5EncoderModel

CHANNELS = 8


def longcat_audio() -> LongCatAudioDiTPipeline:
    tokenizer = tokens.t5()
    vae = LongCatAudioDiTVae(
        channels=8,
        c_mults=[1, 1, 1],
        strides=[4, 8, 10],
        latent_dim=CHANNELS,
        encoder_latent_dim=2 * CHANNELS,
        downsampling_ratio=320,
        sample_rate=8000,
    )
    vars(vae)["tiny_gain"] = 0.4  # most samples would be clipped otherwise
    return LongCatAudioDiTPipeline(
        vae=vae,
        text_encoder=UMT5EncoderModel(UMT5Config(**components.t5_sizes(len(tokenizer)))),
        tokenizer=tokenizer,
        transformer=LongCatAudioDiTTransformer(
            dit_dim=32, dit_depth=2, dit_heads=2, dit_text_dim=tokens.WIDTH, latent_dim=CHANNELS
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, invert_sigmas=True),
    )


PIPELINES = {"longcat-audio": longcat_audio}
