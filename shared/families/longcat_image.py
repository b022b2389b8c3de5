"""LongCat-Image."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import ROWS, SAME, forward

FAMILY = Family(
    denoisers={
        "LongCatImageTransformer2DModel": Denoiser(
            forward("hidden_states", "encoder_hidden_states", "guidance", timestep=ROWS, img_ids=SAME, txt_ids=SAME),
            packed=True,
        )
    }
)
