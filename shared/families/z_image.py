"""Z-Image."""

from shared.architectures.family import ControlNet, Denoiser, Family
from shared.architectures.stacking_rules import FORM, LISTED, PADDED, ROWS, STACKED, StackingRules

FAMILY = Family(
    denoisers={
        # The last two that are listed are those of Omni, whose entries are lists of images and texts.
        "ZImageTransformer2DModel": Denoiser(
            {
                "forward": StackingRules(
                    "x",
                    {
                        **dict.fromkeys(("x", "cap_feats", "siglip_feats", "image_noise_mask"), LISTED),
                        "t": ROWS,
                        "controlnet_block_samples": PADDED,
                        "return_dict": FORM,
                    },
                    True,
                )
            },
            packed=True,
            # The scale is an input of a layer: jobs with others share forwards of the denoiser only.
            control_net=ControlNet(
                "ZImageControlNetModel",
                {
                    "forward": StackingRules(
                        "x", {"x": LISTED, "cap_feats": LISTED, "t": ROWS, "control_context": STACKED}
                    )
                },
                borrowing=True,
            ),
        )
    },
    control_pipelines={
        "ZImagePipeline": "ZImageControlNetPipeline",
        "ZImageInpaintPipeline": "ZImageControlNetInpaintPipeline",
    },
)
