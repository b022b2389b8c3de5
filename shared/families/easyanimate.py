"""EasyAnimate."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import TIMES, forward

FAMILY = Family(
    denoisers={
        "EasyAnimateTransformer3DModel": Denoiser(forward("hidden_states", "encoder_hidden_states", timestep=TIMES))
    }
)
