"""DreamLite."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import TIMES, Argument, Kind, forward

FAMILY = Family(
    denoisers={
        "DreamLiteUNetModel": Denoiser(
            forward(
                "sample",
                "added_cond_kwargs",
                timestep=TIMES,
                encoder_hidden_states=Argument(Kind.PADDED, mask="encoder_attention_mask"),
                encoder_attention_mask=Argument(Kind.MASK, dtype="int64"),
            )
        )
    }
)
