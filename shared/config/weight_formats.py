"""Formats of a model's weights in memory: the `quantization` table and `layerwise_casting` of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from shared.signature import DENOISERS

WeightFormat = Literal["torchao-int8", "torchao-fp8", "bitsandbytes-int8", "bitsandbytes-nf4"]
StorageDtype = Literal["float8_e4m3fn", "float8_e5m2"]
HeldAs = WeightFormat | StorageDtype


class Quantization(BaseModel):
    """Formats of the linear layers of the denoisers and of the text encoders; None is the model's dtype.

    `gguf` has the file of a denoiser's quantized weights by the denoiser's name; it replaces those of the source.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    denoiser: WeightFormat | None = None
    text_encoder: WeightFormat | None = None
    gguf: dict[str, str] = {}

    @model_validator(mode="after")
    def _is_consistent(self) -> Quantization:
        if self.denoiser is not None and self.gguf:
            raise ValueError("denoiser and gguf exclude each other: the files are quantized already")
        if unknown := [name for name in self.gguf if name not in DENOISERS]:
            raise ValueError(f"gguf: {', '.join(unknown)} is not one of {', '.join(DENOISERS)}")
        if self == Quantization.model_construct():
            raise ValueError("set denoiser, text_encoder or gguf")
        return self

    @property
    def formats(self) -> dict[str, WeightFormat]:
        """Return the formats by the key that sets them."""
        keys = {"denoiser": self.denoiser, "text_encoder": self.text_encoder}
        return {key: weight_format for key, weight_format in keys.items() if weight_format is not None}

    def format_of(self, component: str) -> WeightFormat | None:
        """Return the format of a component of the pipeline."""
        return self.formats.get(key_of(component) or "")

    def resolve_paths(self, folder: Path) -> Quantization:
        """Return the table with the files of `gguf` relative to `folder`."""
        files = {name: str((folder / file).resolve()) for name, file in self.gguf.items()}
        return self.model_copy(update={"gguf": files})


def key_of(component: str) -> str | None:
    """Return the key that sets the format of a component, None if it is never quantized."""
    if component in DENOISERS:
        return "denoiser"
    return "text_encoder" if component.startswith("text_encoder") else None


def casting_fault(quantization: Quantization | None, offload: str, compiled: bool | str) -> str | None:
    """Return which other key of a model excludes layerwise casting and why, None if none does."""
    if quantization is not None and (quantization.denoiser is not None or quantization.gguf):
        return "needs no quantization of the denoiser: its weights would be rounded twice"
    if compiled:
        return "needs compile = false: each change of a weight's dtype is compiled again"
    if offload != "none":
        return 'needs offload = "none": it is not tested with it'
    return None
