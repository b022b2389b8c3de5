"""Hunyuan3D-2: meshes, by hy3dgen's classes."""

from shared.architectures.family import Denoiser, Encoder, Family
from shared.architectures.stacking_rules import REPEATED, UNUSED, forward

_IMAGES = forward("image", mask=UNUSED, view_idxs=REPEATED)  # several views are the entries of one row

FAMILY = Family(
    denoisers={"Hunyuan3DDiT": Denoiser(forward("x", "t", "contexts", "guidance"))},
    encoders={
        "SingleImageEncoder": Encoder(_IMAGES),
        "DualImageEncoder": Encoder(_IMAGES),
        "ShapeVAE": Encoder(forward("latents")),
        "CrossAttentionDecoder": Encoder(forward("queries", "latents")),
    },
)
