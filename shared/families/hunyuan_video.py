"""HunyuanVideo and HunyuanVideo 1.5."""

from shared.architectures.family import Denoiser, Encoder, Family
from shared.architectures.stacking_rules import TIMES, VAE, Argument, Kind, forward
from shared.tasks import Task

FAMILY = Family(
    denoisers={
        "HunyuanVideoTransformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "pooled_projections",
                "guidance",
                timestep=TIMES,
                # With an image in the prompt its length varies; the mask is always given.
                encoder_hidden_states=Argument(Kind.PADDED, mask="encoder_attention_mask"),
                encoder_attention_mask=Argument(Kind.MASK, dtype="float32"),
            )
        ),
        "HunyuanVideo15Transformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "encoder_attention_mask",
                "encoder_hidden_states_2",
                "encoder_attention_mask_2",
                "image_embeds",
                timestep=TIMES,
                timestep_r=TIMES,
            )
        ),
    },
    encoders={
        "AutoencoderKLHunyuanVideo": Encoder(VAE, divisible=True),
        # Its attention takes one row only: its mask has the wrong shape for more.
        "AutoencoderKLHunyuanVideo15": Encoder(divisible=True),
    },
    siblings={
        ("HunyuanVideo15Pipeline", Task.IMAGE_TO_VIDEO): "HunyuanVideo15ImageToVideoPipeline",
        ("HunyuanVideo15ImageToVideoPipeline", Task.TEXT_TO_VIDEO): "HunyuanVideo15Pipeline",
    },
)
