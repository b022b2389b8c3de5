"""ERNIE-Image."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import PADDED, ROWS, forward

FAMILY = Family(
    denoisers={
        # The model masks `text_bth` beyond each row's `text_lens`.
        "ErnieImageTransformer2DModel": Denoiser(
            forward("hidden_states", "text_lens", timestep=ROWS, text_bth=PADDED), packed=True
        )
    }
)
