"""Diffusion transformers of images with one pipeline each."""

from __future__ import annotations

from contextlib import nullcontext

from parity.cells import LATE, TEXT, Cell, small_images

CELLS = tuple(
    Cell(
        family=family,
        models=models,
        pipelines=pipelines,
        tiny=tiny,
        jobs=TEXT,
        joining=LATE,
        around=small_images("images.unlisted") if tiny == "pixart-sigma" else nullcontext,
    )
    for family, models, pipelines, tiny in (
        ("PixArt", "PixArt-Sigma", "PixArtSigmaPipeline", "pixart-sigma"),
        ("AuraFlow", "AuraFlow", "AuraFlowPipeline", "aura-flow"),
        ("Lumina", "Lumina 2", "Lumina2Pipeline", "lumina-2"),
        ("Chroma", "Chroma", "ChromaPipeline", "chroma"),
    )
)
