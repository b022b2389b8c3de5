"""Chroma."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import ROWS, SAME, SHARED, forward

FAMILY = Family(
    denoisers={
        "ChromaTransformer2DModel": Denoiser(
            forward(
                "hidden_states", "encoder_hidden_states", "attention_mask", timestep=ROWS, img_ids=SAME, txt_ids=SHARED
            ),
            packed=True,
        )
    }
)
