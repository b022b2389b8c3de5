"""CogView 3 Plus and CogView 4."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import TIMES, forward

# Text has no mask, so prompts of CogView 4 fuse only if their tokens fill as many groups of sixteen.
_RULES = forward(
    "hidden_states", "encoder_hidden_states", "original_size", "target_size", "crop_coords", timestep=TIMES
)

FAMILY = Family(
    denoisers={
        "CogView3PlusTransformer2DModel": Denoiser(_RULES),
        "CogView4Transformer2DModel": Denoiser(_RULES),
    }
)
