"""Z-Image."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import FORM, LISTED, ROWS, StackingRules

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
                        "return_dict": FORM,
                    },
                    True,
                )
            },
            packed=True,
        )
    }
)
