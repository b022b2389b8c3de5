"""Tiny MiniMax Music 3, songs: a language model writes frames of codes, which a denoiser makes into sound.

The ids of its codes are fixed, so its vocabulary has the size of the real one.
"""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    MiniMaxMusic3ConditionEncoder,
    MiniMaxMusic3ModularPipeline,
    MiniMaxMusic3RVQDepthDecoder,
    MiniMaxMusic3Transformer1DModel,
    MiniMaxMusic3Vocoder,
)
from diffusers.guiders import ClassifierFreeGuidance
from tiny import tokens
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 151_675 + 16_384
WIDTH, LATENTS, CODEBOOKS = 16, 8, 3


def minimax_music_3() -> Any:
    pipeline = MiniMaxMusic3ModularPipeline()
    vocoder = MiniMaxMusic3Vocoder(
        latent_channels=LATENTS,
        decoder_input_dim=16,
        decoder_hidden_dim=16,
        upsampling_ratios=(4, 8),
        sampling_rate=8000,
    )
    vars(vocoder)["tiny_gain"] = 0.6  # most samples would be clipped otherwise
    pipeline.update_components(
        tokenizer=tokens.qwen(tokens.PROMPT_WORDS),
        language_model=Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                tie_word_embeddings=True,
            )
        ),
        rvq_depth_decoder=MiniMaxMusic3RVQDepthDecoder(
            hidden_size=WIDTH,
            num_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            audio_vocab_size=32,
            num_codebooks=CODEBOOKS,
        ),
        condition_encoder=MiniMaxMusic3ConditionEncoder(
            condition_hidden_dim=WIDTH,
            num_condition_layers=CODEBOOKS,
            out_dim=WIDTH,
            input_sampling_rate=8000,
            input_hop_length=320,
            output_sampling_rate=8000,
            output_hop_length=32,
        ),
        transformer=MiniMaxMusic3Transformer1DModel(
            in_channels=LATENTS,
            condition_dim=WIDTH,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            ff_inner_dim=48,
            rotary_dim=8,
            fourier_embedding_dim=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, invert_sigmas=True),
        guider=ClassifierFreeGuidance(guidance_scale=1.7),
        vocoder=vocoder,
    )
    return pipeline


PIPELINES = {"modular-minimax-music-3": minimax_music_3}
