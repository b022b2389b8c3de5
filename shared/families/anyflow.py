"""AnyFlow."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import TIMES, forward

FAMILY = Family(
    denoisers={
        # Two times per row and frame: the step's own, and that of the next one.
        "AnyFlowTransformer3DModel": Denoiser(
            forward("hidden_states", "encoder_hidden_states", timestep=TIMES, r_timestep=TIMES)
        )
    }
)
