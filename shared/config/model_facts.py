"""What a worker that has loaded a model knows of it, which the models file and a hub id do not say."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from shared.config.noise_schedulers import OwnScheduler


class ModelFacts(BaseModel):
    """Facts of a loaded model. Sides of its images are multiples of `size_step`, and one of `upscale_factors` times as
    long as those of an image or a video that it upscales; all of its videos have the rate `fps`; `unusable_schedulers`
    are those of the models file that it cannot use, and `unusable_options` options of any scheduler, with the reason of
    each."""

    model_config = ConfigDict(frozen=True)

    size_step: Annotated[int, Field(ge=1)] = 1
    fps: Annotated[int, Field(ge=1)] | None = None
    upscale_factors: tuple[Annotated[float, Field(ge=1)], ...] = ()
    own_scheduler: OwnScheduler = OwnScheduler()
    unusable_schedulers: dict[str, str] = {}
    unusable_options: dict[str, str] = {}
