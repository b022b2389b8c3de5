"""Tiny AnyFlow and ChronoEdit, which have the parts of Wan."""

from __future__ import annotations

from typing import Any

from diffusers import (
    AnyFlowFARPipeline,
    AnyFlowFARTransformer3DModel,
    AnyFlowPipeline,
    AnyFlowTransformer3DModel,
    ChronoEditPipeline,
    ChronoEditTransformer3DModel,
    FlowMapEulerDiscreteScheduler,
)
from tiny.more import wan
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel


def anyflow() -> AnyFlowPipeline:
    """It denoises from one time to another, so its denoiser gets both."""
    parts: dict[str, Any] = wan.parts() | {"scheduler": FlowMapEulerDiscreteScheduler(shift=5.0)}
    transformer = AnyFlowTransformer3DModel(in_channels=4, out_channels=4, **wan.SIZES)
    return AnyFlowPipeline(**parts, transformer=transformer)


def anyflow_far() -> AnyFlowFARPipeline:
    """It makes chunks of one and two latent frames, and keeps keys and values of those before."""
    parts: dict[str, Any] = wan.parts() | {"scheduler": FlowMapEulerDiscreteScheduler(shift=5.0)}
    transformer = AnyFlowFARTransformer3DModel(in_channels=4, out_channels=4, chunk_partition=(1, 2), **wan.SIZES)
    return AnyFlowFARPipeline(**parts, transformer=transformer)


def chrono_edit() -> ChronoEditPipeline:
    vision = {"hidden_size": 16, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformer = ChronoEditTransformer3DModel(
        in_channels=12, out_channels=4, image_dim=16, added_kv_proj_dim=24, **wan.SIZES
    )
    return ChronoEditPipeline(
        **wan.parts(),
        transformer=transformer,
        image_encoder=CLIPVisionModel(CLIPVisionConfig(image_size=16, patch_size=8, **vision)),
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
    )


PIPELINES = {"anyflow": anyflow, "anyflow-far": anyflow_far, "chrono-edit": chrono_edit}
