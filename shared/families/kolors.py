"""Kolors; its denoiser is that of Stable Diffusion XL."""

from shared.architectures.family import Family

FAMILY = Family(denoising_parts=frozenset({"KolorsImg2ImgPipeline", "KolorsPAGPipeline", "KolorsPipeline"}))
