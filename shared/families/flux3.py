"""FLUX.3."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import ROWS, SAME, SHARED, forward

FAMILY = Family(
    denoisers={
        # Text has no mask, so prompts fuse only if their tokens fill as many windows of 80.
        "Flux3Transformer2DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "image_cond_hidden_states",
                timestep=ROWS,
                target_timestep=ROWS,
                img_ids=SAME,
                txt_ids=SHARED,
                image_cond_ids=SAME,
            ),
            packed=True,
        )
    }
)
