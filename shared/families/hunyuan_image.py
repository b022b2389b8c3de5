"""HunyuanImage 2.1."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import ROWS, forward

FAMILY = Family(
    denoisers={
        "HunyuanImageTransformer2DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "encoder_attention_mask",
                "encoder_hidden_states_2",
                "encoder_attention_mask_2",
                "guidance",
                timestep=ROWS,
                timestep_r=ROWS,
            )
        )
    }
)
