"""Which shared fields of jobs a model's forward can mix all the same: facts of its architecture.

Plain data, so that the signature can ask without torch. What stands here is proven by a parity test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

# Names that pipelines give to the modules which they call once or more a step.
DENOISERS = ("transformer", "transformer_2", "unet", "unet_2", "prior")

Mixable = Literal["adapters"]

# Classes of which every layer that adapters change is given the rows of a forward in its dim 0, in order.
ADAPTERS_PER_ROW = frozenset(
    {
        "UNet2DConditionModel",
        "SD3Transformer2DModel",
        "FluxTransformer2DModel",
        "WanTransformer3DModel",
        "CLIPTextModel",
        "CLIPTextModelWithProjection",
        "T5EncoderModel",
        "UMT5EncoderModel",
    }
)


def mixes(denoisers: Mapping[str, str]) -> tuple[Mixable, ...]:
    """Return the fields that a model with these denoisers (name to class) can mix."""
    return ("adapters",) if denoisers and ADAPTERS_PER_ROW.issuperset(denoisers.values()) else ()


def denoisers_of(folder: Path) -> dict[str, str] | None:
    """Return name and class of a pipeline's denoisers, None where `folder` does not tell."""
    try:
        index = json.loads((folder / "model_index.json").read_text("utf-8"))
        return {name: str(index[name][1]) for name in DENOISERS if name in index and index[name][1]}
    except (OSError, ValueError, TypeError, LookupError):
        return None  # loading the model tells what is the matter with it
