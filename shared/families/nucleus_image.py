"""NucleusMoE-Image."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import REPEATED, ROWS, Argument, Kind, forward

FAMILY = Family(
    denoisers={
        # Experts choose among the tokens of each row, and get those of all rows, which can change the last bits.
        "NucleusMoEImageTransformer2DModel": Denoiser(
            forward(
                "hidden_states",
                exact=False,
                timestep=ROWS,
                img_shapes=REPEATED,
                encoder_hidden_states=Argument(Kind.PADDED, mask="encoder_hidden_states_mask"),
                encoder_hidden_states_mask=Argument(Kind.MASK, dtype="bool"),
            ),
            packed=True,
        )
    }
)
