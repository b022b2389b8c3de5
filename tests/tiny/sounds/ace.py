"""Tiny ACE-Step 1.5, music with lyrics: with guidance, and the turbo model without."""

from __future__ import annotations

from typing import Any

from diffusers import AceStepPipeline, AceStepTransformer1DModel, AutoencoderOobleck, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ace_step import AceStepAudioTokenDetokenizer, AceStepAudioTokenizer, AceStepConditionEncoder
from tiny import tokens
from transformers import Qwen3Config, Qwen3Model

RATE = 8000
ACOUSTIC = 8  # channels of latents
_ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8}
_SIZES = {"hidden_size": 32, "intermediate_size": 48, **_ATTENTION}


def oobleck(latent_channels: int = ACOUSTIC, rate: int = RATE) -> AutoencoderOobleck:
    vae = AutoencoderOobleck(
        encoder_hidden_size=2 * latent_channels,
        downsampling_ratios=[4, 8, 10],
        channel_multiples=[1, 1, 1],
        decoder_channels=8,
        decoder_input_channels=latent_channels,
        audio_channels=2,
        sampling_rate=rate,
    )
    vars(vae)["tiny_gain"] = 0.6  # most samples would be clipped otherwise
    return vae


def ace_step(*, turbo: bool = False) -> AceStepPipeline:
    tokenizer: Any = tokens.qwen(tokens.PROMPT_WORDS)
    text_encoder = Qwen3Model(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=tokens.WIDTH,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        )
    )
    pooling: dict[str, Any] = {**_SIZES, "audio_acoustic_hidden_dim": ACOUSTIC, "num_attention_pooler_hidden_layers": 1}
    return AceStepPipeline(
        vae=oobleck(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=AceStepTransformer1DModel(
            **_SIZES, num_hidden_layers=2, in_channels=3 * ACOUSTIC, audio_acoustic_hidden_dim=ACOUSTIC, is_turbo=turbo
        ),
        condition_encoder=AceStepConditionEncoder(
            **_SIZES,
            text_hidden_dim=tokens.WIDTH,
            timbre_hidden_dim=ACOUSTIC,
            num_lyric_encoder_hidden_layers=1,
            num_timbre_encoder_hidden_layers=1,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
        audio_tokenizer=AceStepAudioTokenizer(**pooling, fsq_dim=32, fsq_input_levels=[8, 5, 5]),
        audio_token_detokenizer=AceStepAudioTokenDetokenizer(**pooling),
    )


PIPELINES = {"ace-step": ace_step, "ace-step-turbo": lambda: ace_step(turbo=True)}
