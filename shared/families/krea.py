"""Krea 2."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import ROWS, SAME, forward

FAMILY = Family(
    denoisers={
        "Krea2Transformer2DModel": Denoiser(
            forward(
                "hidden_states", "encoder_hidden_states", "encoder_attention_mask", timestep=ROWS, position_ids=SAME
            ),
            packed=True,
        )
    }
)
