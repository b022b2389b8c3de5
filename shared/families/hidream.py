"""HiDream."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import LAYERED, TIMES, forward

FAMILY = Family(
    denoisers={
        # Experts get the tokens of all rows, and sum in another order for another number of them.
        "HiDreamImageTransformer2DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states_t5",
                "pooled_embeds",
                exact=False,
                encoder_hidden_states_llama3=LAYERED,
                timesteps=TIMES,
            ),
            packed=True,
        )
    }
)
