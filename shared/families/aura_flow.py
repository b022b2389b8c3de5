"""AuraFlow."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import ROWS, forward

FAMILY = Family(
    denoisers={"AuraFlowTransformer2DModel": Denoiser(forward("hidden_states", "encoder_hidden_states", timestep=ROWS))}
)
