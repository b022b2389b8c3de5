"""MiniMax: H3, videos with sound, and Music 3."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import SAME, TIMES, forward

FAMILY = Family(
    denoisers={
        # Music 3. The length follows from the frames that its language model writes.
        "MiniMaxMusic3Transformer1DModel": Denoiser(forward("hidden_states", "encoder_hidden_states", timestep=TIMES)),
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
        ),
    },
    fixed_rates={"MiniMaxH3ModularPipeline": 24},
)
