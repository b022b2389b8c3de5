"""Tiny Chroma for image-to-image; `tiny.images.unlisted` has that for text-to-image."""

from __future__ import annotations

from diffusers import ChromaImg2ImgPipeline
from tiny.images import unlisted


def chroma_image() -> ChromaImg2ImgPipeline:
    return ChromaImg2ImgPipeline(**unlisted.chroma().components)


PIPELINES = {"chroma-i2i": chroma_image}
