"""SkyReels-V2."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import GROUPED, REPEATED, TIMES, forward

FAMILY = Family(
    denoisers={
        # With diffusion forcing, `timestep` is [rows, frames]. Models that embed `fps` as well take one row only
        # (diffusers 0.42), which the self-check finds.
        "SkyReelsV2Transformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                timestep=TIMES,
                encoder_hidden_states_image=GROUPED,
                fps=REPEATED,
            )
        )
    }
)
