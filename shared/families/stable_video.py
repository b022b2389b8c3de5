"""Stable Video Diffusion."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import TIMES, forward

FAMILY = Family(
    denoisers={
        "UNetSpatioTemporalConditionModel": Denoiser(
            forward("sample", "encoder_hidden_states", "added_time_ids", timestep=TIMES)
        )
    }
)
