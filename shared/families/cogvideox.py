"""CogVideoX."""

from shared.architectures.family import Denoiser, Encoder, Family
from shared.architectures.stacking_rules import SAME, SHARED, TIMES, forward
from shared.tasks import Task

FAMILY = Family(
    denoisers={
        # `ofs` has one entry for all rows.
        "CogVideoXTransformer3DModel": Denoiser(
            forward("hidden_states", "encoder_hidden_states", timestep=TIMES, ofs=SAME, image_rotary_emb=SHARED)
        )
    },
    encoders={"AutoencoderKLCogVideoX": Encoder(divisible=True)},
    siblings={("CogVideoXPipeline", Task.VIDEO_TO_VIDEO): "CogVideoXVideoToVideoPipeline"},
)
