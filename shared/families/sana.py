"""SANA and SANA-Video."""

from shared.architectures.family import ControlNet, Denoiser, Family
from shared.architectures.stacking_rules import FRESH, ROWS, forward

_ROWS = ("hidden_states", "encoder_hidden_states", "encoder_attention_mask", "guidance")

FAMILY = Family(
    denoisers={
        "SanaTransformer2DModel": Denoiser(
            forward(*_ROWS, timestep=ROWS, controlnet_block_samples=FRESH),
            control_net=ControlNet(
                "SanaControlNetModel",
                forward(
                    "hidden_states", "encoder_hidden_states", "controlnet_cond", "encoder_attention_mask", timestep=ROWS
                ),
                nothing=((),),
            ),
        ),
        "SanaVideoTransformer3DModel": Denoiser(forward(*_ROWS, timestep=ROWS)),
    },
    control_pipelines={"SanaPipeline": "SanaControlNetPipeline"},
)
