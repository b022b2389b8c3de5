"""Ideogram 4."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import ROWS, forward

FAMILY = Family(
    denoisers={
        # Text of all prompts is padded to one length, and `segment_ids` mask the padding.
        "Ideogram4Transformer2DModel": Denoiser(
            forward(
                "hidden_states", "encoder_hidden_states", "position_ids", "segment_ids", "indicator", timestep=ROWS
            ),
            packed=True,
        )
    }
)
