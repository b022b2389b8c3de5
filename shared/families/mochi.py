"""Mochi."""

from shared.architectures.family import Denoiser, Encoder, Family
from shared.architectures.stacking_rules import ROWS, forward

FAMILY = Family(
    denoisers={
        "MochiTransformer3DModel": Denoiser(
            forward("hidden_states", "encoder_hidden_states", "encoder_attention_mask", timestep=ROWS)
        )
    },
    encoders={"AutoencoderKLMochi": Encoder(divisible=True)},
)
