"""Refiners: a second denoiser of a model, which makes the last steps of an image from the latents of the first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from shared.tasks import Task

if TYPE_CHECKING:
    from shared.config.model_spec import ModelSpec

TASKS = (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE)
"""Those whose results are latents for a refiner: inpainted images are pasted into the one that they start from."""

NONE = 1.0
"""The `refiner_start` of a request for no refiner."""


class RefinerSpec(BaseModel):
    """The refiner of a model. `source` is a folder or a hub id; `start` is the default of a request's `refiner_start`.

    With a `start` of 1 only jobs that ask for the refiner have it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    source: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    variant: str | None = None
    start: Annotated[float, Field(gt=0, le=1)] = 0.8

    @property
    def id(self) -> str:
        return self.source

    @property
    def name(self) -> str:
        """What names its weights on every machine: of a folder its own name only."""
        own = Path(self.source).name if self.is_folder else self.source
        return "@".join(filter(None, (own, self.revision, self.variant)))

    @property
    def is_folder(self) -> bool:
        return Path(self.source).is_absolute()

    def resolve_path(self, folder: Path) -> RefinerSpec:
        """Return the spec with an absolute `source` if it is a folder in `folder`."""
        path = (folder / self.source).resolve()
        return self.model_copy(update={"source": str(path)}) if path.is_dir() else self

    def default_start(self, steps: int) -> float | None:
        """Return the `refiner_start` of a job that does not say; None if one of the two would have no step."""
        least = min(self.start, 1 - self.start) * steps
        return self.start if round(least, 6) >= 1 else None


def refiner_fault(spec: ModelSpec) -> str | None:
    """Return what is wrong with a model that has a refiner."""
    if not set(TASKS).intersection(spec.tasks):
        return f"a refiner needs one of the tasks {', '.join(TASKS)}"
    used: Mapping[str, bool] = {
        "devices": spec.devices > 1,
        "quantization": spec.quantization is not None,
        "offload": spec.offload != "none",
        "compile": bool(spec.compile),
    }
    excluding = ", ".join(key for key, is_used in used.items() if is_used)
    return f"a refiner excludes {excluding}: remove one of them" if excluding else None
