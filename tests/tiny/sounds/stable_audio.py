"""Tiny Stable Audio Open and Stable Audio 3, sounds and music without words."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderSAME,
    EDMDPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    StableAudio3DiTModel,
    StableAudio3Pipeline,
    StableAudioDiTModel,
    StableAudioPipeline,
    StableAudioProjectionModel,
)
from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder
from tiny import tokens
from tiny.components import t5_encoder
from tiny.sounds.ace import ACOUSTIC, RATE, oobleck
from transformers import T5GemmaConfig, T5GemmaEncoderModel
from transformers.models.t5gemma import T5GemmaModuleConfig


def stable_audio() -> StableAudioPipeline:
    tokenizer = tokens.t5(max_length=64)
    return StableAudioPipeline(
        vae=oobleck(),
        text_encoder=t5_encoder(tokenizer),
        projection_model=StableAudioProjectionModel(
            text_encoder_dim=tokens.WIDTH, conditioning_dim=tokens.WIDTH, min_value=0, max_value=32
        ),
        tokenizer=tokenizer,
        transformer=StableAudioDiTModel(
            sample_size=64,  # latents: 2.56 seconds
            in_channels=ACOUSTIC,
            out_channels=ACOUSTIC,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_attention_heads=1,
            cross_attention_dim=16,
            time_proj_dim=16,
            global_states_input_dim=2 * tokens.WIDTH,
            cross_attention_input_dim=tokens.WIDTH,
        ),
        scheduler=EDMDPMSolverMultistepScheduler(
            sigma_max=8.0, solver_order=2, prediction_type="v_prediction", sigma_data=1.0, sigma_schedule="exponential"
        ),
    )


def stable_audio_3(*, distilled: bool = False) -> StableAudio3Pipeline:
    tokenizer = tokens.gemma()
    tokenizer.model_max_length = 64
    part: Any = {
        "vocab_size": len(tokenizer),
        "hidden_size": tokens.WIDTH,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    config = T5GemmaConfig(
        encoder=T5GemmaModuleConfig(**part), decoder=T5GemmaModuleConfig(**part), is_encoder_decoder=False
    )
    vae = AutoencoderSAME(
        patch_size=32,
        encoder_channels=16,
        encoder_c_mults=[2],
        encoder_strides=[4],
        encoder_transformer_depths=[1],
        latent_dim=ACOUSTIC,
        dim_heads=16,
        sampling_rate=RATE,
    )
    vars(vae)["tiny_gain"] = 0.7  # most samples would be clipped otherwise
    return StableAudio3Pipeline(
        vae=vae,
        text_encoder=T5GemmaEncoderModel(config),
        tokenizer=tokenizer,
        duration_embedder=StableAudio3DurationEmbedder(output_dim=tokens.WIDTH, fourier_dim=16),
        transformer=StableAudio3DiTModel(
            io_channels=ACOUSTIC,
            embed_dim=32,
            depth=2,
            num_heads=2,
            cond_token_dim=tokens.WIDTH,
            global_cond_dim=tokens.WIDTH,
            local_add_cond_dim=ACOUSTIC + 1,
            timestep_features_dim=16,
            num_memory_tokens=4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, stochastic_sampling=distilled),
    )


PIPELINES = {
    "stable-audio": stable_audio,
    "stable-audio-3-base": stable_audio_3,
    "stable-audio-3": lambda: stable_audio_3(distilled=True),
}
