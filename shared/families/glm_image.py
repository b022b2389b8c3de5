"""GLM-Image."""

from shared.architectures.family import Denoiser, Family
from shared.architectures.stacking_rules import CACHE, ROWS, forward

FAMILY = Family(
    denoisers={
        # Glyphs are not padded: attention adds their mask as ones and zeros, which hides nothing.
        "GlmImageTransformer2DModel": Denoiser(
            forward(
                "hidden_states",
                "encoder_hidden_states",
                "prior_token_id",
                "prior_token_drop",
                "target_size",
                "crop_coords",
                timestep=ROWS,
                kv_caches=CACHE,
            )
        )
    },
    listed_images=frozenset({"GlmImagePipeline"}),
)
