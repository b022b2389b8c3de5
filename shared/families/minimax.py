"""MiniMax-H3."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import SAME, forward

FAMILY = Family(
    denoisers={
        # One sequence of text, sound and video, without a mask: only prompts of equal length at the same times fuse.
        "MiniMaxH3Transformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "audio_hidden_states",
                "encoder_hidden_states",
                timestep=SAME,
                timestep_indices=SAME,
                token_tags=SAME,
                position_ids=SAME,
                video_indices=SAME,
                audio_indices=SAME,
                text_indices=SAME,
            )
        )
    }
)
