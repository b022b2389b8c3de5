"""Tiny Kandinsky 6: videos with sound, of text or from an image."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky6TI2VAPipeline,
    Kandinsky6Transformer3DModel,
    MMAudioVAE,
    MMAudioVocoder,
)
from tiny import components, tokens
from tiny.more.kandinsky5 import TEMPLATES
from transformers import CLIPTextModel

_MELS = 8


def kandinsky_6() -> Kandinsky6TI2VAPipeline:
    first, second = tokens.qwen(TEMPLATES), tokens.clip()
    return Kandinsky6TI2VAPipeline(
        text_encoder=components.qwen_vl(len(first)),
        tokenizer=first,
        text_encoder_2=CLIPTextModel(components.clip_config(second)),
        tokenizer_2=second,
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=4, block_out_channels=(8, 8, 8, 16), layers_per_block=1, norm_num_groups=4
        ),
        transformer=Kandinsky6Transformer3DModel(
            in_visual_dim=4,
            out_visual_dim=4,
            in_text_dim=tokens.WIDTH,
            in_text_dim2=tokens.WIDTH,
            time_dim=32,
            model_dim=32,
            ff_dim=48,
            num_text_blocks=1,
            num_visual_blocks=2,
            axes_dims=(4, 6, 6),
            in_audio_dim=4,
            out_audio_dim=4,
            visual_token_type_num_embeddings=2,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        audio_vae=MMAudioVAE(
            mel_bins=_MELS,
            latent_channels=4,
            hidden_channels=8,
            channel_multipliers=(1, 1),
            layers_per_block=1,
            sample_rate=8000,
            n_fft=64,
            hop_length=16,
        ),
        vocoder=MMAudioVocoder(
            num_mels=_MELS,
            upsample_initial_channel=16,
            upsample_rates=(4, 4),
            upsample_kernel_sizes=(8, 8),
            resblock_kernel_sizes=(3,),
            resblock_dilation_sizes=((1, 3),),
        ),
    )


PIPELINES = {"kandinsky-6": kandinsky_6}
