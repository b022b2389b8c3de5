"""How the arguments of each architecture's forward are put together: plain data, readable without torch.

A class that is not listed here runs unfused. What a rule claims is proven twice: by the parity test of its
architecture, and by the self-check when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What becomes of one argument when calls are fused."""

    STACKED = "stacked"  # dim 0 is rows; a dict, list or tuple is stacked leaf by leaf
    LISTED = "listed"  # a list with one entry a row, each of its own shape
    SHARED = "shared"  # a function of shapes only: that of the first call serves all
    ROWS = "rows"  # a number, a 0-dim tensor or one entry a row: becomes one entry a row
    PADDED = "padded"  # as stacked, but dim 1 may differ: padded with zeros and masked
    MASK = "mask"  # the mask of a padded argument; made where the pipeline left it out
    EQUAL = "equal"  # must be the same in all calls
    UNUSED = "unused"  # accepted by the signature and ignored by the code: left out


@dataclass(frozen=True)
class Argument:
    """One argument's rule. `dtype` is what ROWS and a made MASK are cast to; `mask` names a PADDED's mask."""

    kind: Kind
    dtype: str | None = None
    mask: str | None = None


@dataclass(frozen=True)
class Rules:
    """The rules of one method. `rows` names the argument whose length of dim 0 (or whose length) is the rows.

    An argument that is not named must be equal. `listed_output` says that the result is a list of one a row.
    """

    rows: str
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    listed_output: bool = False


STACKED = Argument(Kind.STACKED)
SHARED = Argument(Kind.SHARED)
UNUSED = Argument(Kind.UNUSED)
TIMESTEP = Argument(Kind.ROWS, dtype="float32")

_TEXT = Rules("input_ids", {"input_ids": STACKED, "attention_mask": STACKED})
_VAE_ENCODE = Rules("x", {"x": STACKED})

# class name -> method -> rules
ARCHITECTURES: Mapping[str, Mapping[str, Rules]] = {
    "UNet2DConditionModel": {
        "forward": Rules(
            "sample",
            {
                "sample": STACKED,
                "timestep": TIMESTEP,  # int64 or float32 by scheduler; embedded as float32 either way
                "encoder_hidden_states": STACKED,
                "class_labels": STACKED,
                "timestep_cond": STACKED,
                "attention_mask": STACKED,
                "encoder_attention_mask": STACKED,
                "added_cond_kwargs": STACKED,
            },
        )
    },
    "SD3Transformer2DModel": {
        "forward": Rules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "encoder_hidden_states": STACKED,
                "pooled_projections": STACKED,
                "timestep": Argument(Kind.ROWS),
            },
        )
    },
    "FluxTransformer2DModel": {
        "forward": Rules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "encoder_hidden_states": STACKED,
                "pooled_projections": STACKED,
                "timestep": Argument(Kind.ROWS),
                "guidance": STACKED,
                "img_ids": SHARED,
                "txt_ids": SHARED,
            },
        )
    },
    "AutoencoderKL": {
        "encode": _VAE_ENCODE,
        "decode": Rules("z", {"z": STACKED, "generator": UNUSED}),
    },
    "AutoencoderTiny": {
        "encode": _VAE_ENCODE,
        "decode": Rules("x", {"x": STACKED, "generator": UNUSED}),
    },
    "CLIPTextModel": {"forward": _TEXT},
    "CLIPTextModelWithProjection": {"forward": _TEXT},
    "T5EncoderModel": {"forward": _TEXT},
}

# Names that pipelines give to the modules which they call once or more a step.
DENOISERS = ("transformer", "transformer_2", "unet", "unet_2", "prior")
