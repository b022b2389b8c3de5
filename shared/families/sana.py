"""SANA and SANA-Video."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import ROWS, forward

_RULES = forward("hidden_states", "encoder_hidden_states", "encoder_attention_mask", "guidance", timestep=ROWS)

FAMILY = Family(
    denoisers={
        "SanaTransformer2DModel": Denoiser(_RULES),
        "SanaVideoTransformer3DModel": Denoiser(_RULES),
    }
)
