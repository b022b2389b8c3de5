"""AnimateDiff."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import GROUPED, TIMES, forward

FAMILY = Family(
    denoisers={
        # The text is repeated for each frame.
        "UNetMotionModel": Denoiser(
            forward("sample", "timestep_cond", "added_cond_kwargs", timestep=TIMES, encoder_hidden_states=GROUPED),
            weighted_prompts=True,
        )
    }
)
