"""What requests of a model can ask for: defaults and limits of their fields, and sizes that follow from images."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.config.adapters import MAX_ADAPTERS
from shared.config.controls import MAX_CONTROLS
from shared.config.scheduler_choices import Scheduler
from shared.job_fields import MAX_DURATION_S, MAX_FPS, Extra

MAX_INPUT_IMAGES = 16
Dimension = Annotated[int, Field(ge=16, le=8192)]


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Defaults(Table):
    """Defaults of request fields.

    `guidance_scale_2` is for the less noisy steps of models with two denoisers. `frames` and `duration_s`
    default to the maximum.
    """

    width: Dimension = 512
    height: Dimension = 512
    steps: Annotated[int, Field(ge=1)] = 30
    guidance_scale: Annotated[float, Field(ge=0)] = 5.0
    strength: Annotated[float, Field(gt=0, le=1)] = 0.6
    negative_prompt: str | None = None
    guidance_scale_2: Annotated[float | None, Field(ge=0)] = None
    scheduler: Scheduler = None
    frames: Annotated[int | None, Field(ge=1)] = None
    duration_s: Annotated[float | None, Field(gt=0)] = None
    fps: Annotated[int, Field(ge=1, le=MAX_FPS)] = 24
    layers: Annotated[int, Field(ge=0)] = 0
    extra: Extra = {}


class Limits(Table):
    """Limits of request fields. `multiple_of` applies to both sides, beside what the model's files need; prompts
    are limited in characters.

    Frames are k * `frames_multiple` + 1, as a video's first frame is encoded separately. `last_image`: whether
    image-to-video requests can or must have a last image. `max_input_frames`, `_video_pixels` of a frame and
    `_video_bytes` limit the video that a job starts from; it uses at most `max_frames` of its frames. `fps` is the rate
    of all videos, where a model has one. Seconds of sounds are at most `max_duration_s`.
    """

    min_side: Dimension = 64
    max_side: Dimension = 2048
    max_pixels: Annotated[int, Field(gt=0)] = 2048 * 2048
    multiple_of: Annotated[int, Field(gt=0)] = 8
    min_steps: Annotated[int, Field(ge=1)] = 1
    max_steps: Annotated[int, Field(ge=1)] = 150
    max_guidance_scale: Annotated[float, Field(ge=0)] = 30.0
    min_frames: Annotated[int, Field(ge=1)] = 1
    max_frames: Annotated[int, Field(ge=1)] = 1
    frames_multiple: Annotated[int, Field(ge=1)] = 1
    fps: Annotated[int | None, Field(ge=1, le=MAX_FPS)] = None
    min_duration_s: Annotated[float, Field(gt=0, le=MAX_DURATION_S)] = 1.0
    max_duration_s: Annotated[float | None, Field(gt=0, le=MAX_DURATION_S)] = None
    last_image: Literal["refused", "allowed", "needed"] = "refused"
    max_layers: Annotated[int, Field(ge=0, le=32)] = 0
    max_input_images: Annotated[int, Field(ge=1, le=MAX_INPUT_IMAGES)] = 1
    max_input_frames: Annotated[int, Field(ge=1)] = 3000
    max_input_video_pixels: Annotated[int, Field(gt=0)] = 4096 * 2304
    max_input_video_bytes: Annotated[int | None, Field(gt=0)] = None
    max_images: Annotated[int, Field(ge=1, le=64)] = 8
    max_prompt_chars: Annotated[int, Field(ge=1)] = 4000
    max_sequence_length: Annotated[int, Field(ge=1)] = 512
    max_adapters: Annotated[int, Field(ge=1, le=MAX_ADAPTERS)] = 4
    max_controls: Annotated[int, Field(ge=1, le=MAX_CONTROLS)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> Limits:
        if self.min_side > self.max_side:
            raise ValueError("min_side is above max_side")
        if self.min_steps > self.max_steps:
            raise ValueError("min_steps is above max_steps")
        if self.min_frames > self.max_frames:
            raise ValueError("min_frames is above max_frames")
        if (self.min_frames - 1) % self.frames_multiple:
            raise ValueError("min_frames is not a multiple of frames_multiple plus one")
        if self.min_duration_s > (self.max_duration_s or MAX_DURATION_S):
            raise ValueError("min_duration_s is above max_duration_s")
        return self

    def allows_side(self, side: int) -> bool:
        return self.min_side <= side <= self.max_side and side % self.multiple_of == 0

    def allows_size(self, width: int, height: int) -> bool:
        return self.allows_side(width) and self.allows_side(height) and width * height <= self.max_pixels

    def size_like(self, width: int, height: int, usual_pixels: int) -> tuple[int, int] | None:
        """Return the allowed size nearest to an image's, in its proportions; None if there is none.

        It has a quarter to four times the `usual_pixels`: with others, models fail or take too long. Sides are rounded
        down, as in diffusers.
        """
        pixels, least_side = width * height, math.ceil(self.min_side / self.multiple_of) * self.multiple_of
        scale = min(max(1.0, math.sqrt(usual_pixels / 4 / pixels)), math.sqrt(4 * usual_pixels / pixels))
        scale = min(scale, self.max_side / max(width, height), math.sqrt(self.max_pixels / pixels))
        scale = max(scale, least_side / min(width, height))
        # A side that is a multiple already is not to lose one by rounding errors.
        columns, rows = (int(side * scale / self.multiple_of + 1e-6) * self.multiple_of for side in (width, height))
        return (columns, rows) if self.allows_size(columns, rows) else None

    @property
    def most_frames(self) -> int:
        return (self.max_frames - 1) // self.frames_multiple * self.frames_multiple + 1

    def most_frames_of(self, frames: int) -> int:
        """Return the most frames of a video of `frames` that are allowed."""
        return (min(frames, self.max_frames) - 1) // self.frames_multiple * self.frames_multiple + 1

    def allows_frames(self, frames: int) -> bool:
        return self.min_frames <= frames <= self.max_frames and (frames - 1) % self.frames_multiple == 0


class References(Table):
    """How images to edit are resized. They become tokens of the forward, so jobs with equal sizes can share one.

    The result has about `pixels` pixels and sides that are multiples of `multiple_of`, with nearly the same
    proportions. Smaller images are enlarged only with `enlarge`.
    """

    pixels: Annotated[int, Field(ge=256, le=4096 * 4096)] = 1024 * 1024
    multiple_of: Annotated[int, Field(ge=1, le=256)] = 32
    enlarge: bool = False

    def size_for(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the resized image."""
        scale = math.sqrt(self.pixels / (width * height))
        if not self.enlarge:
            scale = min(scale, 1.0)
        step, limit = self.multiple_of, max(1, self.pixels // self.multiple_of**2)
        columns, rows = (min(limit, max(1, round(side * scale / step))) for side in (width, height))
        return columns * step, rows * step
