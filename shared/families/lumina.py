"""Lumina 2."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import ROWS, forward

FAMILY = Family(
    denoisers={
        # Captions are padded to the longest of the forward, which changes the last bits of the others.
        "Lumina2Transformer2DModel": Denoiser(
            forward("hidden_states", "encoder_hidden_states", "encoder_attention_mask", exact=False, timestep=ROWS),
            packed=True,
        )
    }
)
