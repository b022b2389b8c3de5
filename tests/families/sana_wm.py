"""SANA-WM, whose videos follow the path of a camera."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from diffusers import FlowMatchEulerDiscreteScheduler, SanaWMPipeline, SanaWMTransformer3DModel
from parity.cells import Fields
from parity.more.families import Clip, Family, video
from tiny import components, tokens
from tiny.videos import ltx2

from shared.tasks import Task

FRAMES = 9
LENS = [70.0, 70.0, 33.0, 31.0]
SLIDE = [[[1, 0, 0, at / 20], [0, 1, 0, 0], [0, 0, 1, at / 10], [0, 0, 0, 1]] for at in range(FRAMES)]
PATHS: tuple[Fields, ...] = (
    {"action": "w-8", "intrinsics": LENS},
    {"c2w": SLIDE, "intrinsics": [LENS] * FRAMES},
    {"action": "jw-5, none-3, i-4"},
    {},
)


def sana_wm() -> SanaWMPipeline:
    tokenizer = tokens.gemma()
    vae = ltx2.vae()
    transformer = SanaWMTransformer3DModel(
        in_channels=4,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        softmax_every_n=2,
        linear_head_dim=16,
        chunk_plucker_channels=6 * vae.temporal_compression_ratio,
        chunk_plucker_post_attn_blocks=2,
        caption_channels=tokens.WIDTH,
    )
    vars(transformer)["tiny_gain"] = 0.6  # larger weights amplify rounding errors a hundredfold
    return SanaWMPipeline(
        tokenizer=tokenizer,
        text_encoder=components.gemma_2(len(tokenizer)),
        vae=vae,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def moving(family: Family) -> Family:
    """Return a family whose jobs follow several paths."""

    def with_paths(jobs: Mapping[str, Fields]) -> dict[str, Fields]:
        return {name: {**fields, "extra": PATHS[at % len(PATHS)]} for at, (name, fields) in enumerate(jobs.items())}

    return replace(family, jobs=with_paths(family.jobs), joining=with_paths(family.joining))


PIPELINES = {"sana-wm": sana_wm}
CALLS = {"SanaWMPipeline": "image negative_prompt height width num_frames fps guidance_scale action intrinsics"}
ROWS = (moving(video("SANA-WM", "SanaWMPipeline", "sana-wm", Clip(FRAMES, 2), task=Task.IMAGE_TO_VIDEO)),)
