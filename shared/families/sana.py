"""SANA, SANA-Video and SANA-WM."""

from shared.architectures.family import ControlNet, Denoiser, Family
from shared.architectures.stacking_rules import FRESH, ROWS, UNUSED, forward

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
        # Each latent frame has a time of its own. `data_info` names the size, which nothing reads.
        "SanaWMTransformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "timestep",
                "encoder_hidden_states",
                "mask",
                "camera_conditions",
                "chunk_plucker",
                data_info=UNUSED,
            )
        ),
    },
    control_pipelines={"SanaPipeline": "SanaControlNetPipeline"},
)
