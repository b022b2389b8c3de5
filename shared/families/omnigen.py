"""OmniGen."""

from shared.architectures.family import Denoiser, Family

FAMILY = Family(denoisers={"OmniGenTransformer2DModel": Denoiser(packed=True)})
