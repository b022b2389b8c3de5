"""FLUX.1, with Kontext and Fill."""

from shared.architectures.family import ControlNet, Denoiser, Encoder, Family, KnownCheckpoint
from shared.architectures.stacking_rules import FRESH, ROWS, SAME, SHARED, forward
from shared.tasks import Task

FAMILY = Family(
    denoisers={
        "FluxTransformer2DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "pooled_projections",
                "guidance",
                timestep=ROWS,
                img_ids=SAME,  # reference images with the same number of tokens can have different shapes
                txt_ids=SHARED,
                controlnet_block_samples=FRESH,
                controlnet_single_block_samples=FRESH,
            ),
            packed=True,
            adapters_per_row=True,
            split=True,
            checkpoint_marks=("double_blocks.", "single_transformer_blocks."),
            control_net=ControlNet(
                "FluxControlNetModel",
                forward(
                    "hidden_states",
                    "controlnet_cond",
                    "controlnet_mode",
                    "encoder_hidden_states",
                    "pooled_projections",
                    "guidance",
                    timestep=ROWS,
                    img_ids=SAME,
                    txt_ids=SHARED,
                ),
                nothing=(None, None),
                several="FluxMultiControlNetModel",
            ),
        )
    },
    encoders={"ReduxImageEncoder": Encoder(forward("x"))},
    siblings={
        ("FluxKontextPipeline", Task.INPAINT): "FluxKontextInpaintPipeline",
        ("FluxControlPipeline", Task.IMAGE_TO_IMAGE): "FluxControlImg2ImgPipeline",
        ("FluxControlPipeline", Task.INPAINT): "FluxControlInpaintPipeline",
    },
    control_pipelines={
        "FluxPipeline": "FluxControlNetPipeline",
        "FluxImg2ImgPipeline": "FluxControlNetImg2ImgPipeline",
        "FluxInpaintPipeline": "FluxControlNetInpaintPipeline",
    },
    checkpoints=(KnownCheckpoint("double_blocks.", "FLUX.1", "black-forest-labs/FLUX.1-dev"),),
)
