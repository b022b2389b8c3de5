"""The denoisers of the image families."""

from __future__ import annotations

from worker.engine.architectures.rules import ROWS, SHARED, STACKED, Architectures, Argument, Kind, Rules

IMAGES: Architectures = {
    "UNet2DConditionModel": {
        "forward": Rules(
            "sample",
            {
                "sample": STACKED,
                # int64 or float32 by scheduler; embedded as float32 either way
                "timestep": Argument(Kind.ROWS, dtype="float32"),
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
                "timestep": ROWS,
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
                "timestep": ROWS,
                "guidance": STACKED,
                "img_ids": SHARED,
                "txt_ids": SHARED,
            },
        )
    },
}
