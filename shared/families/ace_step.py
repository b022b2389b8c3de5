"""ACE-Step: songs."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import TIMES, forward

FAMILY = Family(
    denoisers={
        # 1.5. Text and lyrics have no mask: only those of equal length together fuse.
        "AceStepTransformer1DModel": Denoiser(
            forward("hidden_states", "encoder_hidden_states", "context_latents", timestep=TIMES, timestep_r=TIMES)
        )
    }
)
