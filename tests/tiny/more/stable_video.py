"""Tiny Stable Video Diffusion: an image and no prompt."""

from __future__ import annotations

from diffusers import (
    AutoencoderKLTemporalDecoder,
    EulerDiscreteScheduler,
    StableVideoDiffusionPipeline,
    UNetSpatioTemporalConditionModel,
)
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

_WIDTH = 32


def stable_video() -> StableVideoDiffusionPipeline:
    return StableVideoDiffusionPipeline(
        vae=AutoencoderKLTemporalDecoder(
            block_out_channels=(32, 32, 32, 32),
            down_block_types=("DownEncoderBlock2D",) * 4,
            latent_channels=4,
            layers_per_block=1,
        ),
        image_encoder=CLIPVisionModelWithProjection(
            CLIPVisionConfig(
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=224,
                patch_size=56,
                projection_dim=_WIDTH,
            )
        ),
        unet=UNetSpatioTemporalConditionModel(
            block_out_channels=(32, 64),
            layers_per_block=1,
            sample_size=8,
            in_channels=8,
            out_channels=4,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            cross_attention_dim=_WIDTH,
            num_attention_heads=4,
            projection_class_embeddings_input_dim=96,
            addition_time_embed_dim=32,
            num_frames=5,
        ),
        scheduler=EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            interpolation_type="linear",
            prediction_type="v_prediction",
            timestep_spacing="leading",
            timestep_type="continuous",
            use_karras_sigmas=True,
            sigma_min=0.002,
            sigma_max=700.0,
            steps_offset=1,
        ),
        feature_extractor=CLIPImageProcessorPil(crop_size=32, size=32),
    )


PIPELINES = {"stable-video": stable_video}
