"""DeepFloyd IF: pixels are denoised, in stages; its denoiser is that of Stable Diffusion."""

from shared.architectures.family import Family

FAMILY = Family(upscalers={"IFSuperResolutionPipeline": (4,)})
