"""The denoisers of the image families."""

from __future__ import annotations

from worker.engine.fusion.architectures.rules import (
    CACHE,
    FORM,
    LISTED,
    REPEATED,
    ROWS,
    SAME,
    SHARED,
    STACKED,
    Architectures,
    Argument,
    Kind,
    StackingRules,
)

IMAGES: Architectures = {
    "UNet2DConditionModel": {
        "forward": StackingRules(
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
        "forward": StackingRules(
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
        "forward": StackingRules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "encoder_hidden_states": STACKED,
                "pooled_projections": STACKED,
                "timestep": ROWS,
                "guidance": STACKED,
                # Reference pictures of one number of tokens may have different shapes.
                "img_ids": SAME,
                "txt_ids": SHARED,
            },
        )
    },
    # Positions are those of the first row.
    "Flux2Transformer2DModel": {
        "forward": StackingRules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "encoder_hidden_states": STACKED,
                "timestep": ROWS,
                "guidance": STACKED,
                "img_ids": SAME,
                "txt_ids": SAME,
            },
        )
    },
    "ZImageTransformer2DModel": {
        "forward": StackingRules(
            "x", {"x": LISTED, "cap_feats": LISTED, "t": ROWS, "return_dict": FORM}, listed_output=True
        )
    },
    "QwenImageTransformer2DModel": {
        "forward": StackingRules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                # The pipelines drop a mask that hides nothing.
                "encoder_hidden_states": Argument(Kind.PADDED, mask="encoder_hidden_states_mask"),
                "encoder_hidden_states_mask": Argument(Kind.MASK, dtype="bool"),
                "timestep": ROWS,
                "guidance": STACKED,
                "img_shapes": REPEATED,
                "additional_t_cond": STACKED,
            },
        )
    },
    # Its pictures' positions follow the text, and are those of the first row: only equal prompt lengths fuse.
    "QwenImage21Transformer2DModel": {
        "forward": StackingRules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "encoder_hidden_states": STACKED,
                "encoder_hidden_states_mask": STACKED,
                "timestep": ROWS,
                "img_shapes": REPEATED,
                "img_mask": SAME,
            },
        )
    },
    "SanaTransformer2DModel": {
        "forward": StackingRules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "encoder_hidden_states": STACKED,
                "encoder_attention_mask": STACKED,
                "timestep": ROWS,
                "guidance": STACKED,
            },
        )
    },
    "ErnieImageTransformer2DModel": {
        "forward": StackingRules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "timestep": ROWS,
                "text_bth": Argument(Kind.PADDED),  # what is beyond a row's `text_lens` is masked
                "text_lens": STACKED,
            },
        )
    },
    # Glyphs are not padded: the attention adds its mask as ones and zeros, which hides nothing.
    "GlmImageTransformer2DModel": {
        "forward": StackingRules(
            "hidden_states",
            {
                "hidden_states": STACKED,
                "encoder_hidden_states": STACKED,
                "prior_token_id": STACKED,
                "prior_token_drop": STACKED,
                "timestep": ROWS,
                "target_size": STACKED,
                "crop_coords": STACKED,
                "kv_caches": CACHE,
            },
        )
    },
}
