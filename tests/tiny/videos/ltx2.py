"""Tiny LTX-2 and LTX-2.3, video with audio; image-to-video is built of the same modules."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2ConditionPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from tiny import tokens
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

CAPTION = 16
LAYERS = 2  # of the text encoder; the connectors read all of them and the embeddings
VIDEO, AUDIO = 32, 16


def _text_encoder(vocabulary: int) -> Gemma3ForConditionalGeneration:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": CAPTION,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 16,
    }
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text,
            vision_config={**vision, "image_size": 16, "patch_size": 8},
            mm_tokens_per_image=4,
            boi_token_index=1,
            eoi_token_index=1,
            image_token_index=4,
        )
    )


def vae() -> AutoencoderKLLTX2Video:
    return AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        down_block_types=("LTX2VideoDownBlock3D",),
        decoder_block_out_channels=(8,),
        layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatiotemporal",),
        upsample_type=("spatiotemporal",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=2,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    )


def _audio_vae() -> AutoencoderKLLTX2Audio:
    return AutoencoderKLLTX2Audio(
        base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, resolution=16, latent_channels=2, mel_bins=16
    )


def _vocoder(**more: Any) -> dict[str, Any]:
    return {
        "in_channels": 32,
        "hidden_channels": 16,
        "upsample_kernel_sizes": [4, 4],
        "upsample_factors": [2, 2],
        "resnet_kernel_sizes": [3],
        "resnet_dilations": [[1, 3]],
        **more,
    }


def _pipeline(connectors: dict[str, Any], transformer: dict[str, Any], vocoder: Any) -> LTX2Pipeline:
    tokenizer = tokens.gemma()
    return LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05),
        vae=vae(),
        audio_vae=_audio_vae(),
        text_encoder=_text_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        connectors=LTX2TextConnectors(
            caption_channels=CAPTION,
            text_proj_in_factor=LAYERS + 1,
            video_connector_num_layers=1,
            video_connector_num_learnable_registers=8,
            audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=8,
            **connectors,
        ),
        transformer=LTX2VideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=VIDEO // 2,
            cross_attention_dim=VIDEO,
            audio_in_channels=8,
            audio_out_channels=8,
            audio_num_attention_heads=2,
            audio_attention_head_dim=AUDIO // 2,
            audio_cross_attention_dim=AUDIO,
            num_layers=2,
            caption_channels=CAPTION,
            vae_scale_factors=(2, 4, 4),
            rope_type="split",
            **transformer,
        ),
        vocoder=vocoder,
    )


def _heads(video: int, audio: int) -> dict[str, Any]:
    return {
        "video_connector_num_attention_heads": 2,
        "video_connector_attention_head_dim": video // 2,
        "audio_connector_num_attention_heads": 2,
        "audio_connector_attention_head_dim": audio // 2,
        "rope_type": "split",
    }


def ltx_2() -> LTX2Pipeline:
    return _pipeline(_heads(CAPTION, CAPTION), {}, LTX2Vocoder(**_vocoder()))


def ltx_2_3() -> LTX2Pipeline:
    """Each modality has its own connector, gates and modulated prompts, and a vocoder that widens the band."""
    connectors = {
        **_heads(VIDEO, AUDIO),
        "video_gated_attn": True,
        "audio_gated_attn": True,
        "per_modality_projections": True,
        "video_hidden_dim": VIDEO,
        "audio_hidden_dim": AUDIO,
        "proj_bias": True,
    }
    transformer = {
        "gated_attn": True,
        "cross_attn_mod": True,
        "audio_gated_attn": True,
        "audio_cross_attn_mod": True,
        "use_prompt_embeddings": False,
        "perturbed_attn": True,
    }
    widen = {
        "bwe_in_channels": 32,
        "bwe_hidden_channels": 16,
        "bwe_upsample_kernel_sizes": [4, 5],
        "bwe_upsample_factors": [4, 3],
        "bwe_resnet_kernel_sizes": [3],
        "bwe_resnet_dilations": [[1, 3]],
        "filter_length": 16,
        "hop_length": 4,
        "window_length": 16,
        "num_mel_channels": 16,
    }
    return _pipeline(connectors, transformer, LTX2VocoderWithBWE(**_vocoder(**widen)))


def ltx_2_condition() -> LTX2ConditionPipeline:
    return LTX2ConditionPipeline(**ltx_2().components)


PIPELINES = {"ltx-2-condition": ltx_2_condition, "ltx-2": ltx_2, "ltx-2.3": ltx_2_3}
