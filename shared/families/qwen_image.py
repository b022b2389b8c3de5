"""Qwen-Image, with Edit and Layered, and Qwen-Image 2.1."""

from shared.architectures.family import ControlNet, Denoiser, Encoder, Family
from shared.architectures.stacking_rules import FRESH, REPEATED, ROWS, SAME, VAE, Argument, Kind, forward

# The pipelines drop a mask that hides nothing.
_MASKED_TEXT = Argument(Kind.PADDED, mask="encoder_hidden_states_mask")
_TEXT_MASK = Argument(Kind.MASK, dtype="bool")

FAMILY = Family(
    denoisers={
        "QwenImageTransformer2DModel": Denoiser(
            forward(
                "hidden_states",
                "guidance",
                "additional_t_cond",
                timestep=ROWS,
                img_shapes=REPEATED,
                controlnet_block_samples=FRESH,
                encoder_hidden_states=_MASKED_TEXT,
                encoder_hidden_states_mask=_TEXT_MASK,
            ),
            packed=True,
            adapters_per_row=True,
            split=True,
            control_net=ControlNet(
                "QwenImageControlNetModel",
                forward(
                    "hidden_states",
                    "controlnet_cond",
                    timestep=ROWS,
                    img_shapes=REPEATED,
                    encoder_hidden_states=_MASKED_TEXT,
                    encoder_hidden_states_mask=_TEXT_MASK,
                ),
            ),
        ),
        # Image positions follow the text and are those of the first row: only prompts of equal length fuse.
        "QwenImage21Transformer2DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "encoder_hidden_states_mask",
                timestep=ROWS,
                img_shapes=REPEATED,
                img_mask=SAME,
            ),
            packed=True,  # it gets no patches, but sides are rounded alike
        ),
    },
    encoders={"AutoencoderKLQwenImage": Encoder(VAE), "AutoencoderKLQwenImage21": Encoder(VAE)},
    control_pipelines={"QwenImagePipeline": "QwenImageControlNetPipeline"},
)
