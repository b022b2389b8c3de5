"""Stable Diffusion 3 and 3.5."""

from shared.architectures.family import ControlNet, Denoiser, Family, KnownCheckpoint
from shared.architectures.stacking_rules import FRESH, ROWS, forward

FAMILY = Family(
    denoisers={
        "SD3Transformer2DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "pooled_projections",
                timestep=ROWS,
                block_controlnet_hidden_states=FRESH,
            ),
            adapters_per_row=True,
            checkpoint_marks=("joint_blocks.", "transformer_blocks."),
            control_net=ControlNet(
                "SD3ControlNetModel",
                forward(
                    "hidden_states", "controlnet_cond", "encoder_hidden_states", "pooled_projections", timestep=ROWS
                ),
                nothing=(None,),
                several="SD3MultiControlNetModel",
            ),
        )
    },
    control_pipelines={"StableDiffusion3Pipeline": "StableDiffusion3ControlNetPipeline"},
    checkpoints=(
        KnownCheckpoint("joint_blocks.", "Stable Diffusion 3", "stabilityai/stable-diffusion-3-medium-diffusers"),
    ),
)
