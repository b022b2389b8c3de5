"""FramePack."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import SAME, TIMES, forward

FAMILY = Family(
    denoisers={
        # Indices are those of a section: jobs in different sections have others of the same shapes.
        "HunyuanVideoFramepackTransformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "encoder_attention_mask",
                "pooled_projections",
                "image_embeds",
                "guidance",
                "latents_clean",
                "latents_history_2x",
                "latents_history_4x",
                timestep=TIMES,
                indices_latents=SAME,
                indices_latents_clean=SAME,
                indices_latents_history_2x=SAME,
                indices_latents_history_4x=SAME,
            )
        )
    }
)
