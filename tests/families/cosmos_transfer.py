"""Cosmos Transfer 2.5, whose videos follow one of edges or depth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from diffusers import (
    AutoencoderKLWan,
    Cosmos2_5_TransferPipeline,
    CosmosControlNetModel,
    CosmosTransformer3DModel,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.cosmos import pipeline_cosmos2_5_transfer
from parity.more.families import Clip, video
from tiny import components, tokens
from tiny.more.ltx import LenientChecker

from shared.tasks import Task

HEADS, WIDTH, TEXT, LAYERS = 2, 16, 16, 2
SHARED = {
    "num_attention_heads": HEADS,
    "attention_head_dim": WIDTH,
    "mlp_ratio": 2.0,
    "text_embed_dim": TEXT,
    "adaln_lora_dim": 4,
    "max_size": (93, 32, 32),
    "use_crossattn_projection": True,
    "crossattn_proj_in_channels": LAYERS * tokens.WIDTH,
    "encoder_hidden_states_channels": TEXT,
}


def cosmos_transfer() -> Cosmos2_5_TransferPipeline:
    tokenizer = tokens.qwen()
    with without_guardrail():
        pipeline = Cosmos2_5_TransferPipeline(
            text_encoder=components.qwen_vl(len(tokenizer), LAYERS),
            tokenizer=tokenizer,
            transformer=CosmosTransformer3DModel(
                **SHARED,
                in_channels=5,
                out_channels=4,
                num_layers=2,
                extra_pos_embed_type=None,
                controlnet_block_every_n=2,
            ),
            vae=AutoencoderKLWan(
                base_dim=8,
                dim_mult=[1, 1, 1, 1],
                latents_mean=[0.1, -0.1, 0.2, 0.0],
                latents_std=[0.5, 0.6, 0.4, 0.7],
                z_dim=4,
                num_res_blocks=1,
                temperal_downsample=[False, True, True],
            ),
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0, use_karras_sigmas=False
            ),
            controlnet=CosmosControlNetModel(
                **SHARED, n_controlnet_blocks=1, in_channels=7, latent_channels=6, model_channels=HEADS * WIDTH
            ),
        )
    pipeline.register_modules(safety_checker=None)
    return pipeline


@contextmanager
def without_guardrail() -> Iterator[None]:
    with mock.patch.object(pipeline_cosmos2_5_transfer, "CosmosSafetyChecker", LenientChecker):
        yield


NEEDS_TORCHVISION = True
PIPELINES = {"cosmos-transfer-2.5": cosmos_transfer}
CALLS = {"Cosmos2_5_TransferPipeline": "controls negative_prompt height width num_frames guidance_scale"}
ROWS = (
    video(
        "Cosmos Transfer 2.5",
        "Cosmos2_5_TransferPipeline",
        "cosmos-transfer-2.5",
        Clip(5),
        task=Task.VIDEO_TO_VIDEO,
        around="without_guardrail",
    ),
)
