"""Hunyuan-DiT."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import ROWS, SHARED, forward

FAMILY = Family(
    denoisers={
        "HunyuanDiT2DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "text_embedding_mask",
                "encoder_hidden_states_t5",
                "text_embedding_mask_t5",
                "image_meta_size",
                "style",
                timestep=ROWS,
                image_rotary_emb=SHARED,
            )
        )
    }
)
