"""LongCat-AudioDiT: sounds."""

from shared.architectures.family import Denoiser, Encoder, Family
from shared.architectures.stacking_rules import TIMES, forward, rules_for

FAMILY = Family(
    denoisers={
        # A convolution of the text reads beyond its end, so only prompts of equal length fuse.
        "LongCatAudioDiTTransformer": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "encoder_attention_mask",
                "attention_mask",
                "latent_cond",
                timestep=TIMES,
            )
        )
    },
    encoders={"LongCatAudioDiTVae": Encoder({"decode": rules_for("latents")})},
)
