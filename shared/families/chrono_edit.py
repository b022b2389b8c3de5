"""ChronoEdit."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import GROUPED, TIMES, forward

FAMILY = Family(
    denoisers={
        # Wan 2.1 that edits an image by way of a short video.
        "ChronoEditTransformer3DModel": Denoiser(
            forward("hidden_states", "encoder_hidden_states", timestep=TIMES, encoder_hidden_states_image=GROUPED)
        )
    }
)
