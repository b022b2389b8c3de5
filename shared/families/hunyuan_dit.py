"""Hunyuan-DiT."""

from shared.architectures.family import ControlNet, Denoiser, Family
from shared.architectures.stacking_rules import FRESH, ROWS, SHARED, forward

_TEXT = (
    "encoder_hidden_states",
    "text_embedding_mask",
    "encoder_hidden_states_t5",
    "text_embedding_mask_t5",
    "image_meta_size",
    "style",
)

FAMILY = Family(
    denoisers={
        "HunyuanDiT2DModel": Denoiser(
            forward("hidden_states", *_TEXT, timestep=ROWS, image_rotary_emb=SHARED, controlnet_block_samples=FRESH),
            control_net=ControlNet(
                "HunyuanDiT2DControlNetModel",
                forward("hidden_states", "controlnet_cond", *_TEXT, timestep=ROWS, image_rotary_emb=SHARED),
                nothing=(None,),
                several="HunyuanDiT2DMultiControlNetModel",
            ),
        )
    },
    control_pipelines={"HunyuanDiTPipeline": "HunyuanDiTControlNetPipeline"},
)
