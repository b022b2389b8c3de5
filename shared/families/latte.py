"""Latte."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import TIMES, forward

FAMILY = Family(
    denoisers={
        "LatteTransformer3DModel": Denoiser(
            forward("hidden_states", "encoder_hidden_states", "encoder_attention_mask", timestep=TIMES)
        )
    }
)
