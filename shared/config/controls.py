"""Controls: images, such as edges, depth or a pose, that guide a job's results through a control net."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.errors import InvalidRequest

if TYPE_CHECKING:
    from shared.job import Task

MAX_CONTROLS = 4


class ControlSpec(BaseModel):
    """A control of a model. `source` is a folder or a hub id of a control net for the model's denoiser.

    `scale` is the default; scales of requests are 0 to `max_scale`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
    source: str
    kind: Literal["controlnet"] = "controlnet"
    revision: str | None = None
    variant: str | None = None
    scale: Annotated[float, Field(ge=0)] = 1.0
    max_scale: Annotated[float, Field(gt=0)] = 2.0

    @model_validator(mode="after")
    def _scale_is_allowed(self) -> ControlSpec:
        if self.scale > self.max_scale:
            raise ValueError(f"scale {self.scale} is above max_scale {self.max_scale}")
        return self

    @property
    def is_folder(self) -> bool:
        return Path(self.source).is_absolute()

    def resolve_path(self, folder: Path) -> ControlSpec:
        """Return the spec with an absolute `source` if it is a folder in `folder`."""
        path = (folder / self.source).resolve()
        return self.model_copy(update={"source": str(path)}) if path.is_dir() else self


class ControlChoice(BaseModel):
    """A control in a request."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[str, Field(max_length=128, description="One of the model's `controls`.")]
    image: Annotated[str, Field(description="The control image, given like `image`; cropped to the job's size.")]
    scale: float | None = Field(None, strict=True, ge=0, description="Weight of the control. Unset: its default.")
    start: float = Field(0.0, strict=True, ge=0, lt=1, description="Share of the steps before it applies.")
    end: float = Field(1.0, strict=True, gt=0, le=1, description="Share of the steps after which it ends.")


class Control(BaseModel):
    """A control of a job: its weight, and the shares of the steps between which it applies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0


def resolve_controls(
    choices: Sequence[ControlChoice], allowed: Sequence[ControlSpec], limit: int, task: Task
) -> tuple[Control, ...]:
    """Return the controls of a job, or raise `InvalidRequest` for the first that is not allowed."""
    if choices and not allowed:
        raise InvalidRequest("controls: this model has none", param="controls")
    if choices and not task.takes_controls:
        raise InvalidRequest(f"controls: {task.value} takes none", param="controls")
    if len(choices) > limit:
        raise InvalidRequest(f"too many controls: {len(choices)}; at most {limit} are allowed", param="controls")
    specs = {spec.id: spec for spec in allowed}
    chosen: dict[str, Control] = {}
    for at, choice in enumerate(choices):
        spec, param = specs.get(choice.id), f"controls.{at}"
        if spec is None:
            raise InvalidRequest(f"unknown control: {choice.id!r}; available: {', '.join(specs)}", param=f"{param}.id")
        if choice.id in chosen:
            raise InvalidRequest(f"duplicate control: {choice.id!r}", param=f"{param}.id")
        scale = spec.scale if choice.scale is None else choice.scale
        if scale > spec.max_scale:
            message = f"invalid scale of control {choice.id!r}: {scale}; use 0 to {spec.max_scale}"
            raise InvalidRequest(message, param=f"{param}.scale")
        if choice.start >= choice.end:
            message = f"control {choice.id!r} ends at {choice.end}, not after its start at {choice.start}"
            raise InvalidRequest(message, param=f"{param}.end")
        chosen[choice.id] = Control(id=choice.id, scale=scale, start=choice.start, end=choice.end)
    return tuple(chosen.values())
