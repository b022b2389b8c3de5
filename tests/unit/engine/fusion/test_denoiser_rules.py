"""Rules of denoisers that no grid runs: rows of fused forwards equal those of single calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from tiny.weights import SEED, spread

from worker.engine.fusion.fused_call import run_fused
from worker.engine.fusion.module_proxy import ParkedCall, shared_methods_of

TOLERANCE = 1e-5
HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
WAN = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "num_layers": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "ChronoEditTransformer3DModel": {**HEADS, **WAN, "rope_max_seq_len": 32, "image_dim": 4, "added_kv_proj_dim": 24},
    "Krea2Transformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "num_layers": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "timestep_embed_dim": 16,
        "text_hidden_dim": 16,
        "num_text_layers": 3,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 32,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": (4, 4, 4),
    },
    "LongCatImageTransformer2DModel": {
        **HEADS,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
        "axes_dims_rope": [4, 4, 4],
    },
    "SkyReelsV2Transformer3DModel": {**HEADS, **WAN, "rope_max_seq_len": 32},
    "WanAnimateTransformer3DModel": {
        **HEADS,
        **WAN,
        "in_channels": 12,
        "latent_channels": 4,
        "image_dim": 4,
        "rope_max_seq_len": 32,
        "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
        "motion_encoder_size": 16,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 16,
        "face_encoder_hidden_dim": 16,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 2,
    },
}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def krea_2(rows: int) -> dict[str, Any]:
    mask = torch.ones(rows, 5, dtype=torch.bool)
    mask[0, 3:] = False
    return {
        "hidden_states": noise(rows, 4, 4),
        "encoder_hidden_states": noise(rows, 5, 3, 16),
        "timestep": noise(rows).abs(),
        "position_ids": torch.arange(27).reshape(9, 3).float(),
        "encoder_attention_mask": mask,
    }


def longcat(rows: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(rows, 4, 4),
        "encoder_hidden_states": noise(rows, 5, 16),
        "timestep": noise(rows).abs(),
        "img_ids": torch.arange(12).reshape(4, 3).float(),
        "txt_ids": torch.arange(15).reshape(5, 3).float(),
    }


def skyreels_forcing(rows: int) -> dict[str, Any]:
    """With diffusion forcing, every latent frame has a time of its own."""
    return {
        "hidden_states": noise(rows, 4, 3, 8, 8),
        "encoder_hidden_states": noise(rows, 5, 16),
        "timestep": 900 * noise(rows, 3).abs(),
        "enable_diffusion_forcing": True,
        "fps": [1] * rows,
    }


def chrono_edit(rows: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(rows, 4, 2, 8, 8),
        "encoder_hidden_states": noise(rows, 5, 16),
        "encoder_hidden_states_image": noise(rows, 6, 4),
        "timestep": 900 * noise(rows).abs(),
    }


def wan_animate(rows: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(rows, 12, 3, 8, 8),
        "encoder_hidden_states": noise(rows, 5, 16),
        "encoder_hidden_states_image": noise(rows, 6, 4),
        "pose_hidden_states": noise(rows, 4, 2, 8, 8),
        "face_pixel_values": noise(rows, 3, 5, 16, 16),
        "timestep": 900 * noise(rows).abs(),
    }


@pytest.mark.parametrize(
    ("architecture", "arguments"),
    [
        ("ChronoEditTransformer3DModel", chrono_edit),
        ("Krea2Transformer2DModel", krea_2),
        ("LongCatImageTransformer2DModel", longcat),
        ("SkyReelsV2Transformer3DModel", skyreels_forcing),
        ("WanAnimateTransformer3DModel", wan_animate),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@torch.no_grad()
def test_fused_rows_equal_those_of_single_calls(architecture: str, arguments: Callable[[int], dict[str, Any]]) -> None:
    """Calls of two rows and of one."""
    denoiser = getattr(diffusers, architecture)(**CONFIGS[architecture]).eval()
    spread(denoiser, torch.Generator().manual_seed(SEED))
    (method,) = shared_methods_of("transformer", denoiser).values()
    calls = [ParkedCall(method, (), {**arguments(rows), "return_dict": False}) for rows in (2, 1)]
    assert calls[0].batch_key == calls[1].batch_key
    for call, (fused,) in zip(calls, run_fused(calls), strict=True):
        (single,) = call.run()
        assert fused.shape == single.shape
        assert float((fused - single).abs().max() / single.abs().max()) <= TOLERANCE
