"""The families that run with random batch mates."""

from __future__ import annotations

from typing import Any

from parity.more.families import Clip
from parity.more.mates import Mixed
from parity.videos import spec

from shared.config.request_limits import Defaults, Limits
from shared.tasks import Task

THREE = (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE, Task.INPAINT)
TWO_SIZES = ((64, 64), (48, 80))


def _film(tiny: str, clip: Clip = Clip(9, 4, 32)) -> Mixed:  # noqa: B008  # it never changes
    frames, group, side = clip
    return Mixed(
        tiny,
        (Task.TEXT_TO_VIDEO,),
        {"frames": frames, "fps": 24, "n": 1},
        ((side, side),),
        spec=spec(frames, side, side, group),
    )


def _sounds(tiny: str, **fields: Any) -> Mixed:
    return Mixed(
        tiny,
        (Task.TEXT_TO_AUDIO,),
        {"width": 0, "height": 0, **fields},
        sizes=((0, 0),),
        spec={"limits": Limits(max_duration_s=2, max_images=8), "defaults": Defaults(duration_s=2)},
    )


FAMILIES: tuple[Mixed, ...] = (
    Mixed(
        "sd",
        THREE,
        sizes=TWO_SIZES,
        schedulers=("EulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"),
    ),
    Mixed("sdxl", THREE, sizes=TWO_SIZES, schedulers=("EulerAncestralDiscreteScheduler", "DDIMScheduler")),
    Mixed("sd3-16", THREE, sizes=TWO_SIZES),
    Mixed("flux", THREE, sizes=TWO_SIZES),
    Mixed("flux-2-klein-base", sizes=TWO_SIZES),
    Mixed(
        "z-image",
        THREE,
        {"mixed_fields": ("size",)},
        sizes=((64, 64), (80, 48), (48, 80), (96, 48)),
        spec={"mixed_fields": ("size",)},
    ),
    Mixed("qwen-image", THREE, sizes=TWO_SIZES),
    Mixed("sana", around="small_images"),
    Mixed("ernie-image", sizes=TWO_SIZES),
    Mixed("pixart-sigma", around="small_images", schedulers=("DDIMScheduler", "EulerDiscreteScheduler")),
    Mixed("lumina-2", sizes=TWO_SIZES),
    Mixed("chroma", sizes=TWO_SIZES),
    Mixed("aura-flow", sizes=TWO_SIZES),
    Mixed("cogview-4", sizes=TWO_SIZES),
    Mixed("hidream", around="small_hidream"),
    Mixed("hunyuan-dit", around="small_images", schedulers=("DDIMScheduler",)),
    Mixed("pix2pix", (Task.EDIT,), {"reference_sizes": ((64, 64),)}),
    _film("wan-2.1-t2v"),
    _film("ltx-video", Clip(9, 8, 64)),
    _film("skyreels-v2"),
    _sounds("stable-audio-3-base"),
    _sounds("ace-step"),
    _sounds("stable-audio-3", guidance_scale=1.0),
    Mixed("z-image-omni", sizes=TWO_SIZES),
    Mixed("anima", THREE[:2], sizes=TWO_SIZES),
    Mixed("flux-3", (Task.TEXT_TO_IMAGE, Task.EDIT), {"reference_sizes": ((64, 64),)}, sizes=TWO_SIZES),
    _film("modular-minimax-h3", Clip(124, 123, 32)),
)
