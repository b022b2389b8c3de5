"""Controls: images that guide a job's results, through a control net (edges, a pose), an IP-Adapter or Redux (style),
or the denoiser itself (structure)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.artifact_ref import InputSource
from shared.errors import InvalidRequest

if TYPE_CHECKING:
    from shared.tasks import Task

Kind = Literal["controlnet", "ip_adapter", "redux", "structure"]
_NAMES = {"ip_adapter": "an IP-Adapter", "redux": "Redux", "structure": "structure"}
MAX_CONTROLS = 4


class ControlSpec(BaseModel):
    """A control of a model. `source` is a folder or a hub id: of a control net for the model's denoiser, or of an
    IP-Adapter, which is the file `weight_name` in `subfolder`. Its `image_encoder` is a folder there, or of `source` if
    it has a slash. `redux` has the folder or hub id of a pipeline, and `structure`, an input of the denoiser, none.

    `mode` is the kind of image that a union of control nets gets, a number of its authors' list.

    `scale` is the default; scales of requests are 0 to `max_scale`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
    source: str = ""
    kind: Kind = "controlnet"
    revision: str | None = None
    variant: str | None = None
    mode: Annotated[int | None, Field(ge=0)] = None
    weight_name: Annotated[str | None, Field(pattern=r"^[^/\\]+\.safetensors$")] = None
    subfolder: str = ""
    image_encoder: str = "image_encoder"
    scale: Annotated[float, Field(ge=0)] = 1.0
    max_scale: Annotated[float, Field(gt=0)] = 2.0

    @model_validator(mode="after")
    def _scale_is_allowed(self) -> ControlSpec:
        if self.scale > self.max_scale:
            raise ValueError(f"scale {self.scale} is above max_scale {self.max_scale}")
        if (self.weight_name is not None) != (self.kind == "ip_adapter"):
            raise ValueError("weight_name is needed for an ip_adapter, and for nothing else")
        if self.mode is not None and self.kind != "controlnet":
            raise ValueError("mode is for control nets only")
        if bool(self.source) == (self.kind == "structure"):
            raise ValueError('source is needed, unless kind is "structure", which the model itself reads')
        return self

    @property
    def is_folder(self) -> bool:
        return Path(self.source).is_absolute()

    @property
    def is_on_hub(self) -> bool:
        return bool(self.source) and not self.is_folder

    @property
    def encoder_folder(self) -> str:
        """The folder of the image encoder in `source`."""
        inside = "/" not in self.image_encoder
        return (PurePosixPath(self.subfolder) / self.image_encoder).as_posix() if inside else self.image_encoder

    def resolve_path(self, folder: Path) -> ControlSpec:
        """Return the spec with an absolute `source` if it is a folder in `folder`."""
        if not self.source:
            return self
        path = (folder / self.source).resolve()
        return self.model_copy(update={"source": str(path)}) if path.is_dir() else self


def controls_fault(controls: Sequence[ControlSpec], *, as_loaded: bool) -> str | None:
    """Return what is wrong with the controls of a model, which is used `as_loaded` or compiled or quantized."""
    ids = [control.id for control in controls]
    if duplicates := sorted({name for name in ids if ids.count(name) > 1}):
        return f"duplicate control ids: {', '.join(duplicates)}"
    kinds = [control.kind for control in controls]
    for kind in ("ip_adapter", "redux"):
        if kinds.count(kind) > 1:
            return f"a model has at most one control of kind {kind}"
    if len(controls) > 1 and "structure" in kinds:
        return "a control of kind structure is the only one of its model"
    return (
        "an ip_adapter needs compile = false and no quantization" if "ip_adapter" in kinds and not as_loaded else None
    )


def structure_for(task: Task, controls: Sequence[ControlSpec]) -> ControlSpec | None:
    """Return the control that each job of a task must have: that of structure, where `image` is another one."""
    found = next((control for control in controls if control.kind == "structure"), None)
    return found if task.takes_controls and task.takes_image else None


class ControlChoice(BaseModel):
    """A control in a request."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: Annotated[str, Field(max_length=128, description="One of the model's `controls`.")]
    image: Annotated[
        InputSource, Field(description="The control image, given like `image`; cropped to the job's size.")
    ]
    scale: float | None = Field(None, strict=True, ge=0, description="Weight of the control. Unset: its default.")
    start: float = Field(0.0, strict=True, ge=0, lt=1, description="Share of the steps before it applies.")
    end: float = Field(1.0, strict=True, gt=0, le=1, description="Share of the steps after which it ends.")


class Control(BaseModel):
    """A control of a job: its weight, and the shares of the steps between which it applies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    kind: Kind = "controlnet"
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
    needed = structure_for(task, allowed)
    if needed is not None and not choices:
        raise InvalidRequest(f"controls: {task.value} of this model needs {needed.id!r}", param="controls")
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
        if spec.kind != "controlnet" and (choice.start, choice.end) != (0.0, 1.0):
            message = f"control {choice.id!r} is {_NAMES[spec.kind]}, which applies to all steps; remove start and end"
            raise InvalidRequest(message, param=f"{param}.{'start' if choice.start else 'end'}")
        if spec.kind == "structure" and scale != 1:
            message = f"control {choice.id!r} is structure, which has no scale; remove it"
            raise InvalidRequest(message, param=f"{param}.scale")
        chosen[choice.id] = Control(id=choice.id, kind=spec.kind, scale=scale, start=choice.start, end=choice.end)
    return tuple(chosen.values())
