"""Wan 2.1 and 2.2, with VACE and Animate."""

from shared.architectures.family import Denoiser, Encoder, Family
from shared.architectures.stacking_rules import GROUPED, SAME, TIMES, VAE, forward
from shared.tasks import Task

FAMILY = Family(
    denoisers={
        # Where tokens have times of their own (2.2 TI2V), `timestep` is [rows, tokens].
        "WanTransformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                timestep=TIMES,
                encoder_hidden_states_image=GROUPED,  # first and last image are two entries of one row
            ),
            adapters_per_row=True,
            split=True,
        ),
        # `control_hidden_states_scale` has one entry per layer.
        "WanVACETransformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "control_hidden_states",
                timestep=TIMES,
                encoder_hidden_states_image=GROUPED,
                control_hidden_states_scale=SAME,
            )
        ),
        # Faces of all rows are encoded in groups that can span two rows.
        "WanAnimateTransformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "pose_hidden_states",
                "face_pixel_values",
                exact=False,
                timestep=TIMES,
                encoder_hidden_states_image=GROUPED,
            )
        ),
    },
    encoders={"AutoencoderKLWan": Encoder(VAE, divisible=True)},
    siblings={
        ("WanPipeline", Task.IMAGE_TO_VIDEO): "WanImageToVideoPipeline",
        ("WanPipeline", Task.VIDEO_TO_VIDEO): "WanVideoToVideoPipeline",
        ("WanImageToVideoPipeline", Task.TEXT_TO_VIDEO): "WanPipeline",
    },
)
