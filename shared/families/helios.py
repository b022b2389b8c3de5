"""Helios."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import SHARED, TIMES, forward

FAMILY = Family(
    denoisers={
        "HeliosTransformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "latents_history_short",
                "latents_history_mid",
                "latents_history_long",
                timestep=TIMES,
                indices_hidden_states=SHARED,
                indices_latents_history_short=SHARED,
                indices_latents_history_mid=SHARED,
                indices_latents_history_long=SHARED,
            )
        )
    }
)
