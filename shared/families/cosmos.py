"""Cosmos."""

from shared.architectures.family import Denoiser, Encoder, Family
from shared.architectures.stacking_rules import ROWS, SAME, forward

FAMILY = Family(
    denoisers={
        # The padding mask has one row for all.
        "CosmosTransformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "condition_mask",
                "block_controlnet_hidden_states",
                timestep=ROWS,
                padding_mask=SAME,
            ),
            packed=True,
        )
    },
    encoders={
        "AutoencoderKLCosmos": Encoder(divisible=True),
        # Of Transfer 2.5, which has one control net and calls it for every job.
        "CosmosControlNetModel": Encoder(
            forward(
                "controls_latents",
                "latents",
                "encoder_hidden_states",
                "condition_mask",
                timestep=ROWS,
                padding_mask=SAME,
            )
        ),
    },
)
