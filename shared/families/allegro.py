"""Allegro."""

from shared.architectures.family import Denoiser, Encoder, Family
from shared.architectures.stacking_rules import SHARED, TIMES, forward

FAMILY = Family(
    denoisers={
        "AllegroTransformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "encoder_attention_mask",
                timestep=TIMES,
                image_rotary_emb=SHARED,
            )
        )
    },
    # It decodes one row at a time: its tiles have the place of one.
    encoders={"AutoencoderKLAllegro": Encoder(divisible=True)},
)
