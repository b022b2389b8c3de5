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

Mixable = Literal["adapters", "size"]

# The fields of a job that each lets differ.
FIELDS: Mapping[str, frozenset[str]] = {"adapters": frozenset({"adapters"}), "size": frozenset({"width", "height"})}

# Denoisers that take each picture by itself, in a list, and mask what they pad to the longest.
LISTS_OF_PICTURES = frozenset({"ZImageTransformer2DModel"})

# Classes of which every layer that adapters change is given the rows of a forward in its dim 0, in order.
ADAPTERS_PER_ROW = frozenset(
    {
        "UNet2DConditionModel",
        "SD3Transformer2DModel",
        "FluxTransformer2DModel",
        "Flux2Transformer2DModel",
        "QwenImageTransformer2DModel",
        "WanTransformer3DModel",
        "CLIPTextModel",
        "CLIPTextModelWithProjection",
        "T5EncoderModel",
        "UMT5EncoderModel",
    }
)


def mixable_fields(denoisers: Mapping[str, str]) -> tuple[Mixable, ...]:
    """Return the fields that a model with these denoisers (name to class) can mix."""
    able: Mapping[Mixable, frozenset[str]] = {"adapters": ADAPTERS_PER_ROW, "size": LISTS_OF_PICTURES}
    return tuple(field for field, classes in able.items() if denoisers and classes.issuperset(denoisers.values()))


def size_class(width: int, height: int) -> int:
    """Return the side of the square that stands for all sizes of about this many pixels.

    Pictures are padded to the longest of their forward, so that each costs as much as the largest. The pixels of one
    class differ by less than 1.42: whatever their proportions, sizes that are meant to be one are in one, and what is
    learned of a class (seconds, memory, rows that pay) holds for all of it.
    """
    # Half an octave, about the powers of two: round(2 * log2(pixels)), in whole numbers as every process must agree.
    steps = ((2 * (width * height) ** 4).bit_length() - 1) // 2
    return round(2 ** (steps / 4))


def denoisers_of(folder: Path) -> dict[str, str] | None:
    """Return name and class of a pipeline's denoisers, None where `folder` does not tell."""
    try:
        index = json.loads((folder / "model_index.json").read_text("utf-8"))
        return {name: str(index[name][1]) for name in DENOISERS if name in index and index[name][1]}
    except (OSError, ValueError, TypeError, LookupError):
        return None  # loading the model tells what is the matter with it
