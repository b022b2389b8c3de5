"""Rows of the video families."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from harness.engine import SIDE
from parity.cells import LONG, Cell, Fields

from shared.config.request_limits import Defaults, Limits
from shared.job import InputRef
from shared.tasks import Task

Jobs = Mapping[str, Fields]

LAST = InputRef(id="in_2", key="k", content_type="image/png", bytes=1, width=SIDE, height=SIDE)
TEXT = (Task.TEXT_TO_VIDEO,)
IMAGES = (Task.IMAGE_TO_VIDEO,)
BOTH = (*TEXT, *IMAGES)


def texts(frames: int = 9, width: int = SIDE, height: int = SIDE) -> dict[str, Fields]:
    """Prompts of different lengths, seeds, steps and guidance, and one job for two videos."""
    each = {"task": Task.TEXT_TO_VIDEO, "frames": frames, "fps": 24, "width": width, "height": height}
    return {
        "plain": {"prompt": "a dog", "steps": 4, **each},
        "long": {"prompt": LONG, "steps": 5, "guidance_scale": 7.5, **each},
        "short": {"prompt": "fog", "steps": 3, "guidance_scale": 1.0, **each},
        "negative": {"prompt": "a town", "negative_prompt": "rain, snow", "guidance_scale": 2.5, "steps": 4, **each},
        "two": {"prompt": 'a boat called "Ann"', "n": 2, "steps": 3, **each},
        "few-steps": {"prompt": "a mill in the wind", "steps": 2, "guidance_scale": 6.0, **each},
    }


def from_images(jobs: Jobs, **more: Any) -> dict[str, Fields]:
    """Return `jobs` as image-to-video jobs, each with its own image."""
    return {f"{name}-from-image": {**fields, "task": Task.IMAGE_TO_VIDEO, **more} for name, fields in jobs.items()}


def mixed(jobs: Jobs, each: int = 3) -> dict[str, Fields]:
    """Return the first `each` of `jobs` as text-to-video and as image-to-video jobs."""
    return first(jobs, each) | first(from_images(jobs), each)


def few(jobs: Jobs) -> dict[str, Fields]:
    """Return `jobs` for distilled models: with two to four steps and no guidance."""
    return {
        name: {**fields, "steps": 2 + at % 3, "guidance_scale": 1.0} for at, (name, fields) in enumerate(jobs.items())
    }


def barely_guided(jobs: Jobs) -> dict[str, Fields]:
    """Return `jobs` with guidance of at most 2: more multiplies a distilled model's rounding errors by hundreds."""
    return {
        name: {**fields, "guidance_scale": min(2.0, fields.get("guidance_scale", 2.0))} for name, fields in jobs.items()
    }


def late(jobs: Jobs) -> dict[str, Fields]:
    """Return the first and the last of `jobs` with another prompt and seed."""
    names = list(jobs)
    return {f"late-{name}": {**jobs[name], "prompt": f"a bridge, {name}"} for name in (names[0], names[-1])}


def first(jobs: Jobs, count: int) -> dict[str, Fields]:
    return dict(islice(jobs.items(), count))


def spec(frames: int = 9, width: int = SIDE, height: int = SIDE, group: int = 4) -> dict[str, Any]:
    """Return limits and defaults of a video model; its self-check uses the smallest videos that they allow."""
    return {
        "limits": Limits(min_side=height, multiple_of=16, max_frames=frames, frames_multiple=group, max_images=8),
        "defaults": Defaults(width=width, height=height, steps=4, guidance_scale=4.0, frames=frames),
    }


_TEXTS = texts()
_IMAGES = from_images(_TEXTS)
_BOTH_ENDS = from_images(_TEXTS, last_image=LAST)
_SMALL = mixed(texts(width=32, height=32), 4)
_CHUNK = mixed(texts(33))
_WIDE = mixed(texts(33, width=128))

WAN = (
    Cell(
        family="Wan",
        models="Wan 2.1 T2V 1.3B, 14B",
        pipelines="WanPipeline",
        tiny="wan-2.1-t2v",
        tasks=TEXT,
        jobs=_TEXTS,
        joining=late(_TEXTS),
        spec=spec(),
    ),
    Cell(
        family="Wan",
        models="FastWan, TurboWan: 2 to 4 steps, no guidance",
        pipelines="WanPipeline",
        tiny="wan-2.1-t2v",
        tasks=TEXT,
        jobs=few(_TEXTS),
        joining=late(few(_TEXTS)),
        spec=spec(),
    ),
    Cell(
        family="Wan",
        models="Wan 2.2 T2V A14B (two denoisers)",
        pipelines="WanPipeline",
        tiny="wan-2.2-t2v",
        tasks=TEXT,
        jobs=_TEXTS,
        joining=late(_TEXTS),
        spec=spec(),
    ),
    Cell(
        family="Wan",
        models="Wan 2.2 TI2V 5B",
        pipelines="WanPipeline, WanImageToVideoPipeline",
        tiny="wan-2.2-ti2v",
        tasks=BOTH,
        jobs=mixed(_TEXTS, 4),
        joining=late(mixed(_TEXTS)),
        spec=spec(),
        quick=True,
    ),
    Cell(
        family="Wan",
        models="Wan 2.1 I2V 480P, 720P; Fun InP",
        pipelines="WanImageToVideoPipeline",
        tiny="wan-2.1-i2v",
        tasks=IMAGES,
        jobs=_IMAGES,
        joining=late(_IMAGES),
        spec=spec(),
        limits="a last image: without FLF2V's position embedding, diffusers joins its tokens as another row",
    ),
    Cell(
        family="Wan",
        models="Wan 2.1 FLF2V",
        pipelines="WanImageToVideoPipeline",
        tiny="wan-2.1-flf2v",
        tasks=IMAGES,
        jobs=_BOTH_ENDS,
        joining=late(_BOTH_ENDS),
        spec=spec(),
        limits="only a first image: the model takes both",
    ),
    Cell(
        family="Wan",
        models="Wan 2.2 I2V A14B (two denoisers), Fun InP: with and without a last image",
        pipelines="WanImageToVideoPipeline",
        tiny="wan-2.2-i2v",
        tasks=IMAGES,
        jobs=first(_IMAGES, 4) | {f"both-{name}": fields for name, fields in first(_BOTH_ENDS, 3).items()},
        joining=late(_IMAGES),
        spec=spec(),
    ),
)

HUNYUAN = (
    Cell(
        family="HunyuanVideo",
        models="HunyuanVideo",
        pipelines="HunyuanVideoPipeline",
        tiny="hunyuan-video",
        tasks=TEXT,
        jobs=_TEXTS,
        joining=late(_TEXTS),
        spec=spec(),
    ),
    Cell(
        family="HunyuanVideo",
        models="FastHunyuan: 2 to 4 steps",
        pipelines="HunyuanVideoPipeline",
        tiny="hunyuan-video",
        tasks=TEXT,
        jobs=few(_TEXTS),
        joining=late(few(_TEXTS)),
        spec=spec(),
    ),
    Cell(
        family="HunyuanVideo",
        models="HunyuanVideo I2V",
        pipelines="HunyuanVideoImageToVideoPipeline",
        tiny="hunyuan-video-i2v",
        tasks=IMAGES,
        jobs=_IMAGES,
        joining=late(_IMAGES),
        spec=spec(),
        limits="fusing the text encoder (Llava returns the states of all images in one tensor): once per job",
    ),
    Cell(
        family="HunyuanVideo",
        models="HunyuanVideo 1.5 T2V",
        pipelines="HunyuanVideo15Pipeline",
        tiny="hunyuan-video-1.5",
        tasks=TEXT,
        jobs=_TEXTS,
        joining=late(_TEXTS),
        spec=spec(),
        limits="fusing the VAE (diffusers 0.42: its attention fails on more than one row): once per job",
    ),
    Cell(
        family="HunyuanVideo",
        models="HunyuanVideo 1.5 I2V",
        pipelines="HunyuanVideo15ImageToVideoPipeline",
        tiny="hunyuan-video-1.5-i2v",
        tasks=IMAGES,
        jobs=_IMAGES,
        joining=late(_IMAGES),
        spec=spec(),
        limits="fusing the VAE (see above); the size is the model's nearest one to the job's proportions",
    ),
)

HELIOS = (
    Cell(
        family="Helios",
        models="Helios base",
        pipelines="HeliosPipeline",
        tiny="helios",
        tasks=BOTH,
        jobs=_CHUNK,
        joining=late(_CHUNK),
        spec=spec(33),
    ),
    Cell(
        family="Helios",
        models="Helios mid",
        pipelines="HeliosPyramidPipeline",
        tiny="helios-mid",
        tasks=BOTH,
        jobs=_WIDE,
        joining=late(_WIDE),
        spec=spec(33, width=128),
        limits="64x64 (diffusers 0.42 fails on a first stage of one token a frame); stages of different sizes together",
    ),
    Cell(
        family="Helios",
        models="Helios distilled",
        pipelines="HeliosPyramidPipeline",
        tiny="helios-distilled",
        tasks=BOTH,
        jobs=barely_guided(_CHUNK),
        joining=late(barely_guided(_CHUNK)),
        spec=spec(33),
        limits="stages of different sizes together",
    ),
)

LTX = (
    Cell(
        family="LTX-2",
        models="LTX-2 (with sound)",
        pipelines="LTX2Pipeline, LTX2ImageToVideoPipeline",
        tiny="ltx-2",
        tasks=BOTH,
        jobs=_SMALL,
        joining=late(_SMALL),
        spec=spec(width=32, height=32),
    ),
    Cell(
        family="LTX-2",
        models="LTX-2.3 (with sound)",
        pipelines="LTX2Pipeline, LTX2ImageToVideoPipeline",
        tiny="ltx-2.3",
        tasks=BOTH,
        jobs=_SMALL,
        joining=late(_SMALL),
        spec=spec(width=32, height=32),
        limits="fusing the vocoder (rows differ by up to 1e-4): once per job",
    ),
)

CELLS: tuple[Cell, ...] = (*WAN, *HUNYUAN, *HELIOS, *LTX)
