"""Tiny Wan pipelines: 2.1 and 2.2, text-to-video and image-to-video, one denoiser and two."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from tiny import tokens
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

LATENTS: dict[str, Any] = {
    "latents_mean": [0.1, -0.1, 0.2, 0.0],
    "latents_std": [0.5, 0.6, 0.4, 0.7],
    "z_dim": 4,
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}


def _parts() -> dict[str, Any]:
    tokenizer = tokens.t5(512)
    text_encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=len(tokenizer), d_model=tokens.WIDTH, d_ff=37, d_kv=8, num_heads=4, num_layers=2)
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return {"tokenizer": tokenizer, "text_encoder": text_encoder, "scheduler": scheduler}


def _vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 2, 2, 2], **LATENTS)


def _transformer(in_channels: int = 4, **more: Any) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=4,
        text_dim=tokens.WIDTH,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=32,
        **more,
    )


def wan_2_1_text() -> WanPipeline:
    return WanPipeline(**_parts(), vae=_vae(), transformer=_transformer())


def wan_2_2_text() -> WanPipeline:
    """Like T2V A14B: one denoiser for the noisy steps, one for the rest."""
    return WanPipeline(
        **_parts(), vae=_vae(), transformer=_transformer(), transformer_2=_transformer(), boundary_ratio=0.875
    )


def wan_2_2_ti2v() -> WanPipeline:
    """Like TI2V 5B: every token has its own timestep; image-to-video is built of the same modules."""
    vae = AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        dim_mult=[1, 2, 2, 2],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        **LATENTS,
    )
    return WanPipeline(**_parts(), vae=vae, transformer=_transformer(), expand_timesteps=True)


def wan_2_1_image(**transformer: Any) -> WanImageToVideoPipeline:
    """Like I2V 480P, 720P and Fun InP: the image enters as latents with the noise and through an image encoder."""
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return WanImageToVideoPipeline(
        **_parts(),
        vae=_vae(),
        transformer=_transformer(12, image_dim=16, added_kv_proj_dim=24, **transformer),
        image_encoder=CLIPVisionModel(CLIPVisionConfig(image_size=16, patch_size=8, **vision)),
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
    )


def wan_2_1_first_last() -> WanImageToVideoPipeline:
    """Like FLF2V: first and last image, five tokens each, pass the image encoder together."""
    return wan_2_1_image(pos_embed_seq_len=10)


def wan_2_2_image() -> WanImageToVideoPipeline:
    """Like I2V A14B: two denoisers and no image encoder."""
    return WanImageToVideoPipeline(
        **_parts(), vae=_vae(), transformer=_transformer(12), transformer_2=_transformer(12), boundary_ratio=0.9
    )


PIPELINES = {
    "wan-2.1-t2v": wan_2_1_text,
    "wan-2.2-t2v": wan_2_2_text,
    "wan-2.2-ti2v": wan_2_2_ti2v,
    "wan-2.1-i2v": wan_2_1_image,
    "wan-2.1-flf2v": wan_2_1_first_last,
    "wan-2.2-i2v": wan_2_2_image,
}
